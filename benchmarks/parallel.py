# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a step of Llama 8B's blocks on the GPUs of one host, with and without coda's
merged collectives.

``python -m benchmarks parallel OUT.json`` starts a process for each GPU. All variants are in all
processes and take turns, A B C C B A; a sample is the median of steps that run back to back.
"""

import argparse
import datetime as dt
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing import spawn  # type: ignore[attr-defined]

from . import environment, models, worth

TOKENS, PORT = 8192, 29517
#: Name -> (backend, options).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compile": ("inductor", {}),
    "coda": ("coda", {}),
    "coda without merged collectives": ("coda", {"disable": ["collective"]}),
}


def main(arguments: list[str]) -> None:
    """Measure on all GPUs."""
    parser = argparse.ArgumentParser("python -m benchmarks parallel", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    options = parser.parse_args(arguments)
    world = torch.cuda.device_count()
    about = environment.describe(sys.argv[1:], options.commit, "benchmarks.parallel")
    spawn(_rank, (world, options.file, about), nprocs=world)


def _rank(rank: int, world: int, out: Path, about: dict[str, Any]) -> None:
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{PORT}"
    dist.init_process_group("nccl", address, dt.timedelta(minutes=10), world_size=world, rank=rank)
    steps = {name: _step(world, *how) for name, how in VARIANTS.items()}
    for step in steps.values():
        step()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for name in [*steps, *reversed(steps)]:
        dist.barrier()
        samples[name].append(worth.sustained(steps[name], settle=2, sample=3))
    if rank == 0:
        environment.keep(
            out, about | {"gpus": world}, {name: {"samples": s} for name, s in samples.items()}
        )
        print(samples, flush=True)
    dist.destroy_process_group()


def _step(world: int, backend: str, options: dict[str, Any]) -> Any:
    """Forward and backward of the blocks, sharded over ``world`` GPUs."""
    torch.manual_seed(0)
    whole, batch, _ = models.build("8B", TOKENS)
    models.make_causal(whole)  # as newer transformers do by themselves
    model, tokens = whole.model.train(), batch["input_ids"]
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, init_device_mesh("cuda", (world,)), dict(plan))
    model.compile(backend=backend, options=options or None)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, use_cache=False).last_hidden_state.float().square().mean().backward()

    return step
