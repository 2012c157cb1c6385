# SPDX-License-Identifier: Apache-2.0
"""Pretrain with FSDP2: each block compiled and sharded, head and loss as one graph.

Usage: torchrun --nproc-per-node GPUS examples/pretrain_fsdp2.py      (python runs one rank)
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from beside import BACKENDS, REAL, llama, show, tokens
from torch.distributed.fsdp import fully_shard


def sharded(backend: str) -> torch.nn.Module:
    """The Llama as docs/distributed.md wraps it."""
    model = llama()
    for part in (*model.model.layers, model.model.norm):
        part.compile(backend=backend)
    model.model.forward = torch.compiler.disable(model.model.forward)
    model.compile(backend=backend)
    for part in (*model.model.layers, model):
        fully_shard(part)
    return model


def main() -> None:
    """Steps of AdamW under each backend; tokens a second are those of one rank."""
    if "RANK" not in os.environ:
        one = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(one)
    if REAL:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if REAL else "gloo")
    for backend in BACKENDS:
        model, batch = sharded(backend), tokens()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model=model, optimizer=optimizer, batch=batch) -> None:
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        show(backend, step)
        del model, optimizer, step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
