# SPDX-License-Identifier: Apache-2.0
"""Times under load: functions that repeat without pauses, each until the clock is stable.

A large product draws more power than the board allows: within a tenth of a second the clock is
reduced, by a tenth to a quarter, and then a kernel's time depends more on its energy than on its
instructions. A training step is such a load. Rounds with memory reads between the calls
(``timing``) are not, and rank kernels differently (docs/gotchas.md, "Power").
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from coda_inductor.tune.timing import Times

#: The shortest call that counts, in microseconds: the host must be ahead, and shorter calls seldom
#: draw that much power.
LEAST_US = 200.0
#: How much slower a config may be with pauses and still be the fastest under load.
NEAR = 0.08
#: Seconds of each function in a round: until the clock is stable, and those that count. With 0.06
#: and 0.09, medians of three rounds were off by up to 2 % (docs/gotchas.md).
_SETTLE_S, _COUNTED_S = 0.1, 0.15
_ROUNDS = 2
#: The expected difference of two normal variables, in their standard deviation.
_RANGE_OF_TWO = 1.128
#: How often the L2 cache's size is touched before a tensor is touched again.
_L2_TIMES = 4
Call = Callable[[], object]


def contenders(us: Mapping[str, float], configs: Sequence[str]) -> list[str]:
    """The functions to time under load, by their microseconds with pauses: "plain", "unfused" and
    those of ``configs`` that are near the fastest, at most two and a quarter of all, because each
    takes half a second. None if any call is too short."""
    tried = sorted((c for c in configs if c in us), key=us.__getitem__)
    if not tried or min(us[tried[0]], us["plain"], us["unfused"]) < LEAST_US:
        return []
    most = 2 + len(configs) // 4
    near = [config for config in tried[:most] if us[config] <= (1 + NEAR) * us[tried[0]]]
    return ["plain", "unfused", *near]


def sets(bytes_touched: int) -> int:
    """How many sets of tensors, of this many bytes each, alternate so that none is in the cache."""
    l2: Any = torch.cuda.get_device_properties().L2_cache_size
    return max(1, math.ceil(_L2_TIMES * l2 / bytes_touched))


def in_turn(calls: Sequence[Call]) -> Call:
    """A function that calls them in turn, one at each call."""
    turn = itertools.cycle(calls)

    def call() -> object:
        return next(turn)()

    return call


def repeated(calls: Mapping[str, Call], us: Mapping[str, float]) -> dict[str, Times]:
    """Times of ``calls`` under load; ``us``: about the time of one call of each. The order rotates
    from round to round, so that another function runs before each one."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_ROUNDS):
        events = []
        for name in list(calls)[:: 1 - 2 * (number % 2)]:
            settle, counted = (math.ceil(1e6 * s / us[name]) for s in (_SETTLE_S, _COUNTED_S))
            for _ in range(settle):
                calls[name]()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            for _ in range(counted):
                calls[name]()
            after.record()
            events.append((name, before, after, counted))
        torch.cuda.synchronize()
        for name, before, after, counted in events:
            samples[name].append(1e3 * before.elapsed_time(after) / counted)
    return {name: _of_few(values) for name, values in samples.items()}


def _of_few(values: Sequence[float]) -> Times:
    """The mean of two, and twice its standard error, estimated from their difference."""
    mean = statistics.fmean(values)
    return Times(mean, 2 * (max(values) - min(values)) / _RANGE_OF_TWO / math.sqrt(2) / mean)


def under_load(us: Mapping[str, float], loaded: Mapping[str, Times]) -> dict[str, float]:
    """``us``, microseconds with pauses, replaced by those under load. A config that was too slow to
    be measured again stays as much slower than the fastest."""
    kernels = {name: us[name] for name in loaded if name not in ("plain", "unfused")}
    fastest = min(kernels, key=kernels.__getitem__)
    others = loaded[fastest].median / us[fastest]
    return {n: loaded[n].median if n in loaded else others * value for n, value in us.items()}
