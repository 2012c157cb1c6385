# SPDX-License-Identifier: Apache-2.0
"""torchao's FP8 over GPUs of one host, with kernels: as exact as torch.compile's code under the
same wrapping. Run by ``tests/gpu/test_gpu_distributed.py``."""

from __future__ import annotations

import functools

import checks_cuda
import torch
import torch.distributed as dist
from checks_cuda import LAYERS, compared, compiled, model, tokens
from decoder import fresh, full
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import coda_inductor

BACKEND = "cpu:gloo,cuda:nccl"
INDUCTOR = True
LINEARS = 7


def in_fp8(own, **how):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(**how)
    return convert_to_float8_training(own, config=config, module_filter_fn=lambda _, n: n != "head")


def sharded(backend):
    """Weights are gathered in FP8."""
    gathered = functools.partial(in_fp8, enable_fsdp_float8_all_gather=True)
    return checks_cuda.sharded(backend, gathered)


def tensor_parallel(backend):
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    own = in_fp8(model(torch.bfloat16))
    plan = {name: Float8ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    plan |= {name: Float8RowwiseParallel() for name in ("o", "down")}
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in own.layers:
        parallelize_module(block, mesh, dict(plan))
    compiled([own], backend)
    return own, own


def check_fsdp_that_gathers_fp8_is_as_exact_as_torch_compile():
    compared(sharded, split=True)


def check_tensor_parallelism_in_fp8_is_as_exact_as_torch_compile():
    compared(tensor_parallel, split=False)


def check_scales_that_are_computed_after_the_step():
    """Weights are never cast in the graph, and nothing falls back."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    fresh()
    own, step = sharded("coda")
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
    for number in range(3):
        batch = tokens(number, own=True)
        full(step(batch)).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(own)
    counted = torch._dynamo.utils.counters["coda"]
    assert counted["fp8_product"] == 3 * LINEARS
    assert counted["fp8_quantize"] == 2 * 4 + LINEARS
    fused = [s for found in coda_inductor.reports() for s in found.sites if s.fused]
    assert [s for s in fused if s.program.fp8 and s.role == "input gradient"]
    assert len(own.layers) == LAYERS
