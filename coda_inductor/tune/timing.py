# SPDX-License-Identifier: Apache-2.0
"""Comparable times of several functions on a GPU.

Every round runs every function once, in turn, and a time is taken relative to its round, because a
change of the clock affects all functions. Before each call, a buffer larger than the L2 cache is
read, because in a model the previous layer's data has left the cache: so often that no time
includes a wait for the host.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

#: Rounds that warm up the clock, and the most and fewest that count.
_WARM, _MOST, _FEWEST = 3, 40, 15
_SECONDS = 0.8
#: Spread from which on something else must be running, and how often to retry then.
_CALM, _AGAIN = 0.02, 2
#: One read of memory: its bytes and least microseconds (H200); and how much longer all reads
#: together take than the host does in the slowest warm-up call: a busy machine varies.
_READ, _HOST_US, _AHEAD = 600e6, 150.0, 2.0


@dataclass(frozen=True)
class Times:
    """Microseconds of one function: the median of its rounds, and its relative error: twice the
    standard error of a median of that many rounds."""

    median: float
    spread: float


def measure(calls: Mapping[str, Callable[[], object]]) -> dict[str, Times]:
    """Times of ``calls`` on the current CUDA device; at most about a second."""
    flush = _flush()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    host_us = dict.fromkeys(calls, 0.0)
    start = time.monotonic()
    for number in range(_WARM + _MOST):
        late = time.monotonic() - start > _SECONDS
        if late and number >= _WARM + _FEWEST:
            break
        events = []
        for name, call in calls.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(reads(host_us[name])):
                flush()
            before.record()
            started = time.perf_counter()
            call()
            elapsed_us = 1e6 * (time.perf_counter() - started)
            after.record()
            events.append((name, before, after))
            if 0 < number < _WARM:  # the first call compiles and loads
                host_us[name] = max(host_us[name], elapsed_us)
        torch.cuda.synchronize()
        if number >= _WARM:
            for name, before, after in events:
                samples[name].append(1e3 * before.elapsed_time(after))
    return evaluate(samples)


def reads(host_us: float) -> int:
    """The number of reads of the buffer before a call that takes the host ``host_us``."""
    return max(1, math.ceil(_AHEAD * host_us / _HOST_US))


def steady(run: Callable[[], dict[str, Times]]) -> dict[str, Times]:
    """The result of ``run``; if something disturbs it, the calmest of a few tries."""
    times = run()
    for _ in range(_AGAIN):
        if typical(times) <= _CALM:
            break
        times = min(times, run(), key=typical)
    return times


def typical(times: Mapping[str, Times]) -> float:
    """The median spread of ``times``."""
    return statistics.median(time.spread for time in times.values())


def evaluate(samples: Mapping[str, Sequence[float]]) -> dict[str, Times]:
    """Times from samples in microseconds, with the same number for each function."""
    rounds = [statistics.fmean(values) for values in zip(*samples.values(), strict=True)]
    typical = statistics.median(rounds)
    times = {}
    for name, values in samples.items():
        parts = [value / whole for value, whole in zip(values, rounds, strict=True)]
        low, median, high = statistics.quantiles(parts, n=4)
        # The quartiles of a normal distribution are 1.35 standard deviations apart, and a median's
        # standard error is 1.25 of them over the root of their number.
        error = 1.25 * (high - low) / 1.35 / math.sqrt(len(parts))
        times[name] = Times(typical * median, 2 * error / median)
    return times


def _flush() -> Callable[[], object]:
    l2 = torch.cuda.get_device_properties().L2_cache_size
    buffer = torch.ones(max(4 * l2, int(_READ)) // 4, device="cuda")
    return buffer.amax
