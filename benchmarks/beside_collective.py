# SPDX-License-Identifier: Apache-2.0
"""GEMMs while NCCL gathers parameters on another stream: which schedule suffers least.

    torchrun --nproc-per-node 2 benchmarks/beside_collective.py [OUT.json]       # a minute

For some kinds of sites at 8B widths: microseconds of cuBLAS and of the best config, with a fixed
share of the tiles for each processor, with a counter that hands them out, on fewer processors, and
as several CTAs for each, one after the other; alone, beside an all-gather that takes longer than
the GEMM, and as a row of GEMMs into which a gather comes: until both are done, and what the
gather takes of that. The slowest rank counts.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.overhead import tensors
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.select.choice import choose
from coda_inductor.select.config import Config
from coda_inductor.select.device import gpu_of
from coda_inductor.select.kinds import TERMS, kinds

M, N, K = 4096, 4096, 4096
KINDS = ("scale", "rms_partial", "swiglu", "dswiglu", "norm_bwd_joined")
ROUNDS = 25
#: Processors that are left to the collective.
LEFT = (8, 16)
#: CTAs for each processor, one after the other: the next to come may be the collective's.
TURNS = (2, 4, 8)
#: GEMMs of a row, and elements a rank of the gather that comes into it.
ROW, SMALL = 12, 2**25


def timed(call: Callable[[], object], beside: Callable[[], object] | None) -> float:
    """Median microseconds of ``call`` on this rank, alone or while ``beside`` runs on a stream of
    its own."""
    side, found = torch.cuda.Stream(), []
    for _ in range(ROUNDS + 3):
        dist.barrier()
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if beside is not None:
            with torch.cuda.stream(side):
                beside()
            torch.cuda._sleep(100_000)  # until it holds its processors
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        found.append(1e3 * before.elapsed_time(after))
    return statistics.median(found[3:])


def met(call: Callable[[], object], collective: Callable[[], object]) -> tuple[float, float]:
    """Median microseconds of a row of calls on this rank while ``collective`` comes, on a stream
    of higher priority as FSDP's, after the first: until both are done; and those of the
    collective, from when it could begin."""
    side, found = torch.cuda.Stream(priority=-1), []
    for _ in range(ROUNDS + 3):
        dist.barrier()
        torch.cuda.synchronize()
        before, ready, after, over = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        torch.cuda._sleep(2_000_000)  # until all is queued
        before.record()
        call()
        ready.record()
        side.wait_event(ready)
        with torch.cuda.stream(side):
            collective()
            over.record()
        for _ in range(ROW - 1):
            call()
        after.record()
        torch.cuda.synchronize()
        both = max(before.elapsed_time(after), before.elapsed_time(over))
        found.append((1e3 * both, 1e3 * ready.elapsed_time(over)))
    both, own = zip(*found[3:], strict=True)
    return statistics.median(both), statistics.median(own)


def products(as_: Sequence[torch.Tensor], bs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each weight with its left operand, in cuBLAS."""
    return [torch.mm(as_[i % len(as_)], b) for i, b in enumerate(bs)]


def slowest(us: float) -> float:
    """The largest of all ranks."""
    largest = torch.tensor(us, device="cuda")
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return round(largest.item(), 2)


@torch.no_grad()
def measure() -> dict[str, dict[str, dict[str, float]]]:
    """{kind: {schedule: {"alone", "beside", "row", "row, gather", "gather"}}}."""
    shard = torch.ones(2**28, dtype=torch.bfloat16, device="cuda")  # half a GiB
    whole = shard.new_empty(shard.numel() * dist.get_world_size())

    def gather() -> None:
        dist.all_gather_into_tensor(whole, shard)

    few = whole[: SMALL * dist.get_world_size()]

    def gather_few() -> None:
        dist.all_gather_into_tensor(few, shard[:SMALL])

    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in KINDS:
        program = kinds()[kind]
        as_, weights, operands = tensors(kind, M, N, K)
        bs, text = weights[0], program.to_json()
        fixed = choose(program, M, N, K * TERMS[kind], terms=TERMS[kind], gpu=gpu_of())
        ways = {"fixed": str(fixed), "counter": str(fixed.dynamic_twin())}
        processors = gpu_of().processors
        ways |= {f"{left} left": f"{fixed}:p{processors - left}" for left in LEFT}
        ways |= {f"{turns} turns": f"{fixed}:p{processors * turns}" for turns in TURNS}
        ways = {name: str(Config.parse(config)) for name, config in ways.items()}
        run = functools.partial(gemm_epilogue, as_, bs, operands, text)
        calls: dict[str, Callable[[], object]] = {
            f"{name} {config}": functools.partial(run, config, kind, True)
            for name, config in ways.items()
        }
        calls["cuBLAS"] = functools.partial(products, as_, bs)
        for name, call in calls.items():
            both, own = met(call, gather_few)
            found.setdefault(kind, {})[name] = {
                "alone": slowest(timed(call, None)),
                "beside": slowest(timed(call, gather)),
                "row": slowest(met(call, lambda: None)[0]),
                "row, gather": slowest(both),
                "gather": slowest(own),
            }
    return found


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    result = measure()
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1))
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
