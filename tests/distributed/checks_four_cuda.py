# SPDX-License-Identifier: Apache-2.0
"""Kernels on four ranks, sharded two ways across each other. For ``test_gpu_distributed.py``."""

from __future__ import annotations

import torch
from checks_cuda import BACKEND, INDUCTOR, PLAN, compared, compiled, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

__all__ = ["BACKEND", "INDUCTOR"]


def crossed(backend):
    """FSDP2 over pairs of ranks, tensor parallelism within each."""
    own = model(torch.float32)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
    for block in own.layers:
        parallelize_module(block, mesh["tensor"], dict(PLAN))
    compiled(own.layers, backend)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*own.layers, own):
        fully_shard(part, mesh=mesh["data"], mp_policy=policy)
    return own, own


def copies_of_shards(backend):
    """Sharded over pairs, each of which has a copy of the model (HSDP)."""
    own = model(torch.float32)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("copies", "shards"))
    compiled(own.layers, backend)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*own.layers, own):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return own, own


def check_tensor_parallelism_inside_of_fsdp():
    compared(crossed, split=False)


def check_copies_of_sharded_models():
    compared(copies_of_shards, split=True)
