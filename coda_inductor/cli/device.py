# SPDX-License-Identifier: Apache-2.0
"""A pattern between real GEMMs on a device: its error against float32 and its speed."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from coda_inductor import backend
from coda_inductor.cli.trial import Example, example_of, step
from coda_inductor.patterns import Pattern

#: Rows, and the widths of Llama-3.2-1B: K in front, N between.
SIZES = (8192, 2048, 8192)
Step = Callable[[], list[Tensor]]


def steps(
    pattern: Pattern,
    idiom: Callable[..., Tensor],
    path: str,
    device: torch.device,
    sizes: tuple[int, int, int] = SIZES,
) -> tuple[dict[str, Step], Step]:
    """Forward and backward of a pattern's example in bfloat16 under eager, torch.compile and coda,
    and in float32; each gives the output and the gradients of input and parameters.

    Args:
        pattern: what the example has,
        idiom: in this spelling.
        path: the pattern's file.
        device: where.
        sizes: rows, K and N.
    """
    torch.manual_seed(0)
    rows, k, n = sizes
    model = Example(idiom, example_of(pattern), k, n).to(device, torch.bfloat16)
    x, dy = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.compiler.reset()
    coda = functools.partial(backend.coda, options={"patterns": [path]})
    functions: dict[str, Callable[..., Tensor]] = {
        "eager": model,
        "torch.compile": torch.compile(model),
        "coda": torch.compile(model, backend=coda),
    }
    exact = copy.deepcopy(model).float()
    found: dict[str, Step] = {
        name: functools.partial(step, f, model, x, dy) for name, f in functions.items()
    }
    return found, functools.partial(step, exact, exact, x.float(), dy.float())


def errors(variants: dict[str, Step], exact: Step) -> dict[str, float]:
    """The largest relative error (Frobenius) of output and gradients against float32."""
    want = exact()
    return {
        name: max(
            ((h.float() - w).norm() / w.norm()).item() for h, w in zip(have(), want, strict=True)
        )
        for name, have in variants.items()
    }


def medians(functions: dict[str, Step], rounds: int = 30) -> dict[str, float]:
    """Median milliseconds of each. They take turns, so that clocks that drift do so for all of
    them; three rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(samples) for name, samples in times.items()}
