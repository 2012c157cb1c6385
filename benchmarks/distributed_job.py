# SPDX-License-Identifier: Apache-2.0
"""What each rank of suite `distributed` does; started by ``distributed_run`` with torchrun.

Every rank does the same in the same order: nothing here may depend on a clock, or the ranks'
collectives would not meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from coda_inductor import report

from . import models
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
    """One case, the arguments of :func:`run` as JSON; rank 0 writes its result to a file."""
    given, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    if device() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device() == "cuda" else "gloo")
    try:
        found = run(*given)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        dist.barrier()
    finally:
        with contextlib.suppress(Exception):  # of a group that another rank has left
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
