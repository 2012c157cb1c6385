# SPDX-License-Identifier: Apache-2.0
"""Kernels under each way of sharding, on GPUs of one host: as exact as torch.compile's code under
the same wrapping. Run by ``tests/gpu/test_gpu_distributed.py``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoder import VOCABULARY, Decoder, fresh, full
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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


def sharded(backend, converted=lambda own: own):
    """FSDP2: float32 parameters, bfloat16 in the blocks."""
    own = converted(model(torch.float32))
    compiled(own.layers, backend)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for part in (*own.layers, own):
        fully_shard(part, mesh=mesh, mp_policy=policy)
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


def tokens(step: int, *, own: bool) -> torch.Tensor:
    """(2, LENGTH) of a step, for this rank or for all."""
    seed = 100 * step + (dist.get_rank() if own else 0)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).cuda()


def losses(own, step, count: int, *, split: bool) -> list[float]:
    """Of so many steps of AdamW: to say the token that was read."""
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
    found = []
    with torch._dynamo.config.patch(optimize_ddp=False):
        for number in range(count):
            batch = tokens(number, own=split)
            loss = F.cross_entropy(full(step(batch)).float().flatten(0, 1), batch.flatten())
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


def compared(wrap, *, split: bool) -> None:
    """All gradients of one step: the error of ours beside torch.compile's."""
    want, errors = exact(split=split), {}
    for name, backend in BACKENDS.items():
        fresh()
        own, step = wrap(backend)
        batch = tokens(0, own=split)
        with torch._dynamo.config.patch(optimize_ddp=False):
            out = full(step(batch)).float()
            F.cross_entropy(out.flatten(0, 1), batch.flatten()).backward()
        pairs = zip([full(p.grad).double() for p in own.parameters()], want, strict=True)
        errors[name] = sum((a - b).norm().item() ** 2 for a, b in pairs) ** 0.5
        if name == "coda":
            assert sum(found.kernels for found in coda_inductor.reports()) >= 4
    assert errors["coda"] <= 1.1 * errors["compile"], errors


def check_fsdp_is_as_exact_as_torch_compile():
    compared(sharded, split=True)


def check_ddp_is_as_exact_as_torch_compile():
    compared(replicated, split=True)


def check_tensor_parallelism_is_as_exact_as_torch_compile():
    compared(tensor_parallel, split=False)


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
