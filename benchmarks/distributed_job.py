# SPDX-License-Identifier: Apache-2.0
"""Training steps of a stock Llama on all GPUs of a host, one way of wrapping it a call::

    torchrun --standalone --nproc-per-node=2 -m benchmarks.distributed_job OUT.json fsdp_blocks 8B

The variants are interleaved; what OUT.json has of other cases stays there. Every rank does the same
in the same order: nothing here may depend on a clock, or the ranks' collectives would not meet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from coda_inductor import report

from . import environment, models
from .contest import decisions
from .measure import (
    MIB,
    allocated,
    device,
    host_us,
    interleaved,
    kernel_times,
    peak_mib,
    summary,
)
from .wrapped import WAYS, Step

VARIANTS = {"eager": None, "compile": "inductor", "coda": "coda"}
LOSSES, TOP_KERNELS = 3, 40


def _step(way: str, size: str, tokens: int, backend: str | None) -> Step:
    """The model of ``size``, wrapped; the same weights at every call, on every rank."""
    dtype, own_batch, wrap = WAYS[way]
    model = models.llama(size, tokens)
    mesh = dist.device_mesh.init_device_mesh(device(), (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank() if own_batch else 0)
    batch = torch.randint(models.LLAMAS[size]["vocab_size"], (1, tokens), device=device())
    return Step(wrap(model.to(dtype), backend, mesh), batch)


def _slowest(values: dict) -> dict:
    """Of each number, or list of numbers, the largest of all ranks."""
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, values)
    found = {}
    for name, own in values.items():
        ranks = [each[name] for each in everywhere]
        if isinstance(own, list):
            found[name] = [max(several) for several in zip(*ranks, strict=True)]
        else:
            found[name] = None if own is None else max(ranks)
    return found


def run(way: str, size: str, tokens: int, rounds: int, names: list[str]) -> dict:
    """Measure one way of wrapping.

    Args:
        way: a key of ``wrapped.WAYS``.
        size: a key of ``models.LLAMAS``.
        tokens: of a step, on each rank.
        rounds: samples of each variant.
        names: variants, keys of VARIANTS.

    Returns:
        ``{"variants": {name: summary, "host_us", "peak_mib", "held_mib"}, "losses": {name: of the
        first steps}, "decisions": of ours, "profile": of rank 0}``; times and memory are
        those of the slowest and the largest rank.
    """
    calls, held, losses, said = {}, {}, {}, None
    for name in names:
        before = allocated()
        report.forget()
        call = calls[name] = _step(way, size, tokens, VARIANTS[name])
        losses[name] = [call().item() for _ in range(LOSSES)]
        if name == "coda":
            said = decisions()
        held[name] = (allocated() - before) / MIB
    timed = _slowest(interleaved(calls, rounds))
    host = _slowest({name: host_us(call, 3) for name, call in calls.items()})
    peak = _slowest({name: peak_mib(call) for name, call in calls.items()})
    profile = {name: kernel_times(call, 3, TOP_KERNELS) for name, call in calls.items()}
    found = {name: summary(timed[name]) for name in names}
    return {
        "rounds": rounds,
        "variants": {
            name: found[name]
            | {"host_us": host[name], "peak_mib": peak[name], "held_mib": held[name]}
            for name in names
        },
        "losses": losses,
        "decisions": said,
        "profile": {name: _parts(found) for name, found in profile.items()},
        "errors": {},
    }


def _parts(profile: dict) -> dict:
    """With the time of collectives apart; those overlap with the others."""
    collective = [
        k["us"] for k in profile["kernels"] if re.search("nccl", k["name"], re.IGNORECASE)
    ]
    return {**profile, "collectives_us": sum(collective)}


def main() -> None:
    """One case; rank 0 writes its result to a file and prints its times."""
    parser = argparse.ArgumentParser("benchmarks.distributed_job", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("size", choices=models.LLAMAS)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step on each rank")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each variant")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    given = parser.parse_args()
    if device() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device() == "cuda" else "gloo")
    try:
        found = run(given.way, given.size, given.tokens, given.rounds, given.variants)
        if dist.get_rank() == 0:
            results = json.loads(given.file.read_text()) if given.file.exists() else {}
            described = environment.describe(sys.argv[1:], given.commit, parser.prog)
            results["environment"] = {**described, "ranks": dist.get_world_size()}
            name = f"{given.way} {given.size} {given.tokens}"
            results.setdefault("distributed", {})[name] = found
            given.file.write_text(json.dumps(results, indent=1) + "\n")
            print(name, {key: each["median_ms"] for key, each in found["variants"].items()})
        dist.barrier()
    finally:
        with contextlib.suppress(Exception):  # of a group that another rank has left
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
