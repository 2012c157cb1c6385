# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 and their maxima: our kernels beside what Inductor makes of torchao's chain.

    python benchmarks/fp8_casts.py [OUT.json]       # on the GPU; a minute

``cast``: both layouts, the scales given. ``cast row``: as it lies only. ``amax``: of rows and of
columns. ``rowwise``: all of the recipe "rowwise" for an operand, from the bf16 tensor to both
layouts with their scales; ``tensorwise``: the same with one scale. ``ours`` is the ops in a
compiled graph, with the arithmetic of scales around them. The bytes are those that have to move:
a tensor that is needed for a maximum and for a cast is read twice.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import environment
from benchmarks.measure import device, interleaved, summary
from coda_inductor.runtime.fp8_casts import AMAX, CAST

SHAPES = ((8192, 4096), (8192, 14336), (14336, 4096))
E4M3 = torch.float8_e4m3fn
ROUNDS = 41
#: So long the device is kept busy at the start of a round, for the host to be ahead.
QUEUE_MS = 2.0


def scale(amax: Tensor) -> Tensor:
    """The scale that torchao makes of maxima, a power of two."""
    found = (torch.finfo(E4M3).max / amax.to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    return found.log2().floor().exp2()


def cast(x: Tensor, by: Tensor) -> Tensor:
    """As torchao casts."""
    return (x.to(torch.float32) * by).clamp(min=-448.0, max=448.0).to(E4M3)


def turned(q: Tensor) -> Tensor:
    """Column-major, as torchao makes operands of wgrad."""
    return q.t().clone(memory_format=torch.contiguous_format)


def our_rowwise(x: Tensor) -> Any:
    """An operand of recipe "rowwise" by our ops."""
    rows, cols = AMAX(x, None, True, True)
    by_row, by_col = scale(rows.amax(1, keepdim=True)), scale(cols.amax(0, keepdim=True))
    return *CAST(x, None, by_row, E4M3, by_col, E4M3), by_row, by_col


def our_tensorwise(x: Tensor) -> Any:
    """An operand of recipe "tensorwise" by our ops."""
    by = scale(AMAX(x, None, True, False)[0].amax())
    return *CAST(x, None, by, E4M3, by, E4M3), by


def their_rowwise(x: Tensor) -> Any:
    """The same as torchao writes it."""
    by_row, by_col = scale(x.abs().amax(1, keepdim=True)), scale(x.abs().amax(0, keepdim=True))
    return cast(x, by_row), turned(cast(x, by_col)), by_row, by_col


def their_tensorwise(x: Tensor) -> Any:
    """The same as torchao writes it."""
    by = scale(x.abs().max())
    q = cast(x, by)
    return q, turned(q), by


def work(x: Tensor) -> dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]]:
    """What is timed: name -> (bytes that have to move for each element, ours, Inductor's)."""
    rows, cols = scale(x.abs().amax(1, keepdim=True)), scale(x.abs().amax(0, keepdim=True))
    pairs: dict[str, tuple[int, Any, Any, tuple[Tensor, ...]]] = {
        "cast": (
            4,
            lambda x, r, c: CAST(x, None, r, E4M3, c, E4M3),
            lambda x, r, c: (cast(x, r), turned(cast(x, c))),
            (x, rows, cols),
        ),
        "cast row": (
            3,
            lambda x, r: CAST(x, None, r, E4M3, None, None)[0],
            cast,
            (x, rows),
        ),
        "amax": (
            2,
            lambda x: [
                v.amax(dim) for v, dim in zip(AMAX(x, None, True, True), (1, 0), strict=True)
            ],
            lambda x: [x.abs().amax(1), x.abs().amax(0)],
            (x,),
        ),
        "rowwise": (6, our_rowwise, their_rowwise, (x,)),
        "tensorwise": (6, our_tensorwise, their_tensorwise, (x,)),
    }
    return {
        name: (moved, *(functools.partial(compiled(f), *inputs) for f in (ours, theirs)))
        for name, (moved, ours, theirs, inputs) in pairs.items()
    }


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By Inductor, anew for each shape."""
    return torch.compile(function, fullgraph=True, dynamic=False)


@torch.no_grad()
def measure(m: int, k: int, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """{work: {variant: {"us", "p20_us", "p80_us", "gb_per_s"}}} of bf16 (m, k), interleaved."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(m, k, device=device()).bfloat16()
    found = {}
    for name, (moved, ours, theirs) in work(x).items():
        samples = interleaved({"ours": ours, "inductor": theirs}, rounds, queue_ms=QUEUE_MS)
        found[name] = {variant: figures(ms, moved * m * k) for variant, ms in samples.items()}
        print(f"{m} x {k} {name:<11}" + "".join(
            f"  {v} {f['us']:8.1f} us {f['gb_per_s']:6.0f} GB/s" for v, f in found[name].items()
        ), flush=True)  # fmt: skip
    return found


def figures(samples_ms: list[float], moved: int) -> dict[str, float]:
    """Median and spread in microseconds, and bytes by the median."""
    of = summary(samples_ms)
    us = {name: round(1e3 * of[f"{name}_ms"], 2) for name in ("median", "p20", "p80")}
    speed = round(moved / us["median"] / 1e3, 1)
    return {"us": us["median"], "p20_us": us["p20"], "p80_us": us["p80"], "gb_per_s": speed}


def main(arguments: list[str], shapes: Any = SHAPES, rounds: int = ROUNDS) -> None:
    """Measure and print all shapes; write them where ``arguments`` says."""
    about = environment.describe([]) | {"command": "python benchmarks/fp8_casts.py"}
    found = {f"{m} x {k}": measure(m, k, rounds) for m, k in shapes}
    if arguments:
        text = json.dumps({"environment": about, "results": found}, indent=1)
        Path(arguments[0]).write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
