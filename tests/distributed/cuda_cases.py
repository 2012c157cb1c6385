# SPDX-License-Identifier: Apache-2.0
"""Kernels under each way of sharding, on GPUs of one host or on one that the ranks share: as exact
as torch.compile's code under the same wrapping. Run by ``tests/gpu/test_gpu_distributed.py``."""

import functools
import importlib.util
import os

import cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from training import fresh, full, shard
from zoo.layers import VOCABULARY, Decoder

import coda_inductor

BACKEND = "cpu:gloo,cuda:nccl"
LAYERS, WIDTH, LENGTH = 2, 512, 512
#: Name in torch -> options.
BACKENDS = {"inductor": None, "coda": {"gate": "always", "strict": True}}


def model(dtype: torch.dtype) -> Decoder:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    return Decoder(LAYERS, WIDTH).cuda().to(dtype)


def compiled(modules, backend: str) -> None:
    for module in modules:
        module.compile(backend=backend, options=BACKENDS[backend])


def products():

    def policy(_context, op, *args, **kwargs):
        keep = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sharded(backend, converted=lambda own: own, keeps=None):
    """FSDP2: float32 parameters, bfloat16 in the blocks. ``keeps``: what selective checkpoints
    around blocks keep."""
    own = converted(model(torch.float32))
    if keeps is not None:
        how = {"preserve_rng_state": False, "context_fn": keeps}
        for number, block in enumerate([*own.layers]):
            own.layers[number] = checkpoint_wrapper(block, **how)
    compiled(own.layers, backend)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard(own, init_device_mesh("cuda", (dist.get_world_size(),)), mp_policy=policy)
    return own, own


def replicated(backend):
    own = model(torch.bfloat16)
    with torch._dynamo.config.patch(optimize_ddp=False):
        compiled(own.layers, backend)
        step = DistributedDataParallel(own, device_ids=[torch.cuda.current_device()])
    return own, step


def parallel(spread, backend, converted=lambda own: own):
    """Tensor parallelism, as ``spread`` lays a model out."""
    own = converted(model(torch.bfloat16))
    spread(own, init_device_mesh("cuda", (dist.get_world_size(),)))
    compiled([own], backend)
    return own, own


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """To say the token that was read."""
    return F.cross_entropy(full(logits).float().flatten(0, 1), batch.flatten())


def tokens(rank: int) -> torch.Tensor:
    """(2, LENGTH) for a rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).cuda()


def exact(*, split: bool) -> list[torch.Tensor]:
    """Gradients of one step on all ranks' tokens, eager in float64."""
    own = model(torch.float64)
    batch = torch.cat([tokens(rank) for rank in range(dist.get_world_size() if split else 1)])
    F.cross_entropy(own(batch).flatten(0, 1), batch.flatten()).backward()
    return [p.grad for p in own.parameters()]


def compared(wrap, *, split: bool) -> None:
    """All gradients of one step: the error of ours beside torch.compile's."""
    want, errors = exact(split=split), {}
    for name in BACKENDS:
        fresh()
        own, step = wrap(name)
        batch = tokens(dist.get_rank() if split else 0)
        with torch._dynamo.config.patch(optimize_ddp=False):
            loss_of(step(batch), batch).backward()
        pairs = zip([full(p.grad).double() for p in own.parameters()], want, strict=True)
        errors[name] = sum((a - b).norm().item() ** 2 for a, b in pairs) ** 0.5
        if name == "coda":
            assert sum(found.kernels for found in coda_inductor.reports()) >= 4
    assert errors["coda"] <= 1.1 * errors["inductor"], errors


def in_fp8(own, **how):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(**how)
    return convert_to_float8_training(own, config=config, module_filter_fn=lambda _, n: n != "head")


def check(wrap, *args, split=True, **how):
    return functools.partial(compared, functools.partial(wrap, *args, **how), split=split)


#: All are as exact as torch.compile's code under the same wrapping.
CHECKS = {
    "FSDP2": check(sharded),
    "FSDP2 of blocks whose products are kept": check(sharded, keeps=products),
    "DDP": check(replicated),
    "sequence parallelism": check(parallel, cases.sequence_parallel, split=False),
}
if importlib.util.find_spec("torchao") is not None:
    import float8_ranks

    gathered = functools.partial(in_fp8, enable_fsdp_float8_all_gather=True)
    CHECKS |= {
        "FSDP2 that gathers FP8": check(sharded, converted=gathered),
        "tensor parallelism in FP8": check(
            parallel, float8_ranks.parallelized, converted=in_fp8, split=False
        ),
    }
INDUCTOR = True
