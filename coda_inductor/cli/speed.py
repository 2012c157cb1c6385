# SPDX-License-Identifier: Apache-2.0
"""Times of several functions that take turns, so that clocks that drift do so for all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def medians(functions: dict[str, Callable[[], object]], rounds: int = 30) -> dict[str, float]:
    """Median milliseconds of each; device time where there is a GPU. Three rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 3):
        for name, function in functions.items():
            spent = _time(function)
            if turn >= 3:
                times[name].append(spent)
    return {name: statistics.median(samples) for name, samples in times.items()}


def _time(function: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)
