# SPDX-License-Identifier: Apache-2.0
"""Kernels under each way of sharding, on GPUs of one host or on one that the ranks share: as exact
as torch.compile's code under the same wrapping. Run by ``tests/gpu/test_gpu_distributed.py``."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks_fsdp import products
from checks_tensor import sequence_parallel
from decoder import fired, fresh, full
from decoders import VOCABULARY, Decoder
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import coda_inductor

BACKEND = "cpu:gloo,cuda:nccl"
INDUCTOR = True
LAYERS, WIDTH, LENGTH = 2, 512, 512
BACKENDS = {"eager": None, "compile": "inductor", "coda": "coda"}
STEPS, CURVE = 3, 50
PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
PLAN |= {name: RowwiseParallel() for name in ("o", "down")}


def model(dtype: torch.dtype) -> Decoder:
    """The same one on every rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    return Decoder(LAYERS, WIDTH).cuda().to(dtype)


def compiled(modules, backend: str | None) -> None:
    for module in modules:
        if backend is not None:
            options = {"gate": "always", "strict": True} if backend == "coda" else None
            module.compile(backend=backend, options=options)


def sharded(backend, converted=lambda own: own, again=None, **how):
    """FSDP2: float32 parameters, bfloat16 in the blocks. ``again``: what of a block is computed
    again, as arguments of a checkpoint around it."""
    own = converted(model(torch.float32))
    if again is not None:
        for number, block in enumerate([*own.layers]):
            own.layers[number] = checkpoint_wrapper(block, preserve_rng_state=False, **again)
    compiled(own.layers, backend)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for part in (*own.layers, own):
        fully_shard(part, mesh=mesh, mp_policy=policy, **how)
    return own, own


def with_loss(backend):
    """FSDP2, and head and loss as one graph."""
    own, _ = sharded(backend)
    trunk = torch.compiler.disable(own.trunk)
    own.forward = lambda batch: loss_of(own.head(trunk(batch)), batch)
    compiled([own.norm, own], backend)
    return own, own


def replicated(backend):
    """DDP around compiled blocks."""
    own = model(torch.bfloat16)
    with torch._dynamo.config.patch(optimize_ddp=False):
        compiled(own.layers, backend)
        step = DistributedDataParallel(own, device_ids=[torch.cuda.current_device()])
    return own, step


def tensor_parallel(backend):
    own = model(torch.bfloat16)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in own.layers:
        parallelize_module(block, mesh, PLAN)
    compiled([own], backend)
    return own, own


def in_sequence(backend):
    """Tensor parallelism whose residual stream is split along the sequence."""
    own = model(torch.bfloat16)
    sequence_parallel(own, init_device_mesh("cuda", (dist.get_world_size(),)))
    compiled([own], backend)
    return own, own


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """To say the token that was read. What is a loss already stays."""
    out = full(logits).float()
    return F.cross_entropy(out.flatten(0, 1), batch.flatten()) if out.dim() else out


def tokens(step: int, *, own: bool) -> torch.Tensor:
    """(2, LENGTH) of a step, for this rank or for all."""
    seed = 100 * step + (dist.get_rank() if own else 0)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).cuda()


def losses(own, step, count: int, *, split: bool) -> list[float]:
    """Of so many steps of AdamW."""
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
    found = []
    with torch._dynamo.config.patch(optimize_ddp=False):
        for number in range(count):
            batch = tokens(number, own=split)
            loss = loss_of(step(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def exact(*, split: bool) -> list[torch.Tensor]:
    """Gradients of one step on all ranks' tokens, eager in float64."""
    own = model(torch.float64)
    ranks = range(dist.get_world_size()) if split else [0]
    batches = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(rank)
        batches.append(torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).cuda())
    batch = torch.cat(batches)
    F.cross_entropy(own(batch).flatten(0, 1), batch.flatten()).backward()
    return [p.grad for p in own.parameters()]


def compared(wrap, *, split: bool, times: int = 1) -> None:
    """All gradients of one step, the mean of ``times`` that add up and are reduced with the last:
    the error of ours beside torch.compile's."""
    want, errors = exact(split=split), {}
    for name, backend in BACKENDS.items():
        fresh()
        own, step = wrap(backend)
        batch = tokens(0, own=split)
        with torch._dynamo.config.patch(optimize_ddp=False):
            for left in reversed(range(times)):
                if times > 1:
                    own.set_requires_gradient_sync(not left)
                loss_of(step(batch), batch).backward()
        have = [full(p.grad).double().cuda() / times for p in own.parameters()]
        pairs = zip(have, want, strict=True)
        errors[name] = sum((a - b).norm().item() ** 2 for a, b in pairs) ** 0.5
        if name == "coda":
            assert sum(found.kernels for found in coda_inductor.reports()) >= 4
    assert errors["coda"] <= 1.1 * errors["compile"], errors


def check_fsdp_is_as_exact_as_torch_compile():
    compared(sharded, split=True)


def check_gradients_that_add_up_between_reductions():
    """Parameters stay gathered meanwhile."""
    compared(functools.partial(sharded, reshard_after_forward=False), split=True, times=2)


def check_blocks_that_are_computed_again():
    """All of them, then all but their products."""
    for again in ({}, {"context_fn": products}):
        compared(functools.partial(sharded, again=again), split=True)


def check_parameters_that_lie_on_the_cpu():
    compared(functools.partial(sharded, offload_policy=CPUOffloadPolicy()), split=True)


def check_head_and_loss_as_one_graph_beside_blocks():
    compared(with_loss, split=True)
    assert fired()["cross_entropy"] == 1


def check_ddp_is_as_exact_as_torch_compile():
    compared(replicated, split=True)


def check_tensor_parallelism_is_as_exact_as_torch_compile():
    compared(tensor_parallel, split=False)


def check_sequence_parallelism_is_as_exact_as_torch_compile():
    compared(in_sequence, split=False)


def check_fsdp_learns_as_eager_does():
    curves = {}
    for name, backend in BACKENDS.items():
        fresh()
        own, step = sharded(backend)
        curves[name] = losses(own, step, CURVE, split=True)
    apart = {
        name: max(abs(a - b) for a, b in zip(curves[name], curves["eager"], strict=True))
        for name in ("compile", "coda")
    }
    assert curves["coda"][-1] < 0.7 * curves["coda"][0], curves["coda"]
    assert apart["coda"] <= 2 * apart["compile"] + 0.01, (apart, curves)


def check_that_all_ranks_run_the_same_programs():
    fresh()
    own, step = sharded("coda")
    losses(own, step, 1, split=True)
    sites = [(s.site, s.config) for found in coda_inductor.reports() for s in found.sites]
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sites)
    assert sites
    assert all(each == sites for each in everywhere)
