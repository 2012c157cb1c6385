# SPDX-License-Identifier: Apache-2.0
"""torchao's FP8 over GPUs of one host, with kernels: as exact as torch.compile's code under the
same wrapping. Run by ``tests/gpu/test_gpu_distributed.py``."""

from __future__ import annotations

import functools

import checks_cuda
import torch
import torch.distributed as dist
from checks_cuda import compared, compiled, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

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
