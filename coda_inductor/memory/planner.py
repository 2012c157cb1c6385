# SPDX-License-Identifier: Apache-2.0
"""The cheapest choice of what is kept that stays within a limit.

There is one chain of choices for a graph, each with fewer bytes and more milliseconds than the one
before, and a limit selects the first that fits. So less memory never takes less time, and more
memory never takes more. The chain comes from one layer: of all combinations of what its groups of
tensors keep, those that no other one beats in bytes and time. Between two of them the layers change
one by one, the earliest first: it is recomputed last, when the others' tensors are gone.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from coda_inductor.graph.nodes import bytes_of
from coda_inductor.memory.candidates import Freed, Group, Kept, groups, heavy
from coda_inductor.memory.costs import milliseconds
from coda_inductor.select.device import Gpu

#: Combinations of one layer that are compared; kinds beyond them, the smallest ones, are
#: freed last.
_MOST = 1024
#: So many groups of one kind are those of layers, which change one by one.
_MANY = 4
#: Of two peaks that are nearer than this the lower one may be the higher: each prediction is within
#: 2 %, because Inductor reorders (OLMoE: 6.95 GiB, predicted as 7.07).
_SURE = 0.96


@dataclass(frozen=True)
class Choice:
    """What a graph keeps, and what that costs.

    Attributes:
        freed: what is computed again.
        kept: bytes that the forward pass leaves, inputs of the graph apart.
        before: the same without recomputation.
        ms: how long that takes: kernels that run again, and passes over elementwise results.
    """

    freed: Freed
    kept: int
    before: int
    ms: float


class _Rated(NamedTuple):
    """A way to keep less: bytes that it saves, milliseconds that it takes, and what it is."""

    saved: int
    ms: float
    what: Any


class Chain:
    """All choices for one graph, from what is kept without a limit to the least.

    Args:
        kept: what the graph keeps.
        gpu: whose times are compared.
    """

    def __init__(self, kept: Kept, gpu: Gpu):
        self.kept, self.gpu = kept, gpu
        self._times: dict[Node, float] = {}
        kinds: dict[object, list[Group]] = {}
        for group in groups(kept):
            kinds.setdefault(group.kind, []).append(group)
        alike = list(kinds.values())
        self.many = max(map(len, alike), default=1) >= _MANY
        if not self.many:  # not layers
            alike = [[group] for each in alike for group in each]
        self.kinds = sorted(alike, key=lambda k: -len(k) * k[0].size)
        self.layers = max(map(len, self.kinds), default=1)
        self.points = self._points()
        self.states = _best(self._states())

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, at: int) -> Choice:
        freed = Freed()
        for members, levels in zip(self.kinds, self._levels(*self.states[at].what), strict=True):
            for group, level in zip(members, levels, strict=True):
                freed |= group.levels[level]
        return self.choice(freed)

    def first(self, fits: Callable[[Choice], bool]) -> Choice | None:
        """The first that ``fits``; None if there is none."""
        low, high = 0, len(self) - 1
        if not fits(self[high]):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(self[middle]) else (middle + 1, high)
        return self[low]

    def cut(self, peak: Callable[[Freed], int]) -> int:
        """Drop the choices whose peak is not surely below that of one that takes less time, because
        what they compute again is alive at once. Returns the least peak. Between two points, peaks
        follow the layers one by one."""
        ends = [at for at, state in enumerate(self.states) if not state.what[1]]
        left, least = self.states[:1], peak(self[0].freed)
        for here, after in itertools.pairwise(ends):
            if (reached := peak(self[after].freed)) > _SURE * least:
                continue
            between = range(here + 1, after + 1)
            below = functools.partial(self._below, peak, least)
            left += self.states[between[bisect.bisect_left(between, True, key=below)] : after + 1]
            least = reached
        self.states = left
        return least

    def _below(self, peak: Callable[[Freed], int], least: int, at: int) -> bool:
        return peak(self[at].freed) < least

    def choice(self, freed: Freed) -> Choice:
        """The choice to free ``freed``."""
        total = bytes_of(*self.kept.kept)
        left = total - bytes_of(*freed.gone) + bytes_of(*freed.instead)
        return Choice(freed, left, total, self._ms(self.kept.again(freed.gone, freed), freed.gone))

    def _ms(self, again: Collection[Node], gone: Iterable[Node]) -> float:
        """What ``again`` takes, and passes over those of ``gone`` that are elementwise."""
        for node in (heavies := list(filter(heavy, again))):
            if node not in self._times:
                self._times[node] = milliseconds(node, self.gpu)
        passes = 2 * bytes_of(*(n for n in gone if n in again and not _direct(n)))
        return sum(self._times[n] for n in heavies) + passes / self.gpu.bytes_per_us / 1000

    def _levels(self, point: int, done: int) -> list[list[int]]:
        """The level of each group of each kind, if ``done`` layers have gone from a point to the
        next one."""
        here = self.points[point].what
        after = self.points[point + 1].what if done else here
        steps = self._steps(point)
        found = []
        for members, level, then in zip(self.kinds, here, after, strict=True):
            changed = math.ceil(done * len(members) / steps)
            found.append([then] * changed + [level] * (len(members) - changed))
        return found

    def _steps(self, point: int) -> int:
        """The layers that change from a point to the next one: as many as the changing kinds have
        groups. Others have more, as norms, of which a layer has several."""
        if point + 1 == len(self.points):
            return 1
        both = zip(self.kinds, self.points[point].what, self.points[point + 1].what, strict=True)
        return max(len(members) for members, here, after in both if here != after)

    def _states(self) -> Iterator[_Rated]:
        """All points, and the mixes of each two."""
        saved = [[k[0].saved(level) for level in range(len(k[0].levels))] for k in self.kinds]
        for i, here in enumerate(self.points):
            steps = self._steps(i)
            last = i + 1 == len(self.points)
            slope = 0.0 if last else (self.points[i + 1].ms - here.ms) / steps
            for done in range(steps):
                levels = self._levels(i, done)
                total = sum(of[n] for of, each in zip(saved, levels, strict=True) for n in each)
                yield _Rated(total, here.ms + done * slope, (i, done))

    def _points(self) -> list[_Rated]:
        """Levels of all kinds, from nothing to most freed: what no other combination beats."""
        levels = [range(len(k[0].levels)) for k in self.kinds]
        few = len(levels)
        while math.prod(map(len, levels[:few])) > _MOST:
            few -= 1
        rest = (0,) * (len(levels) - few)
        found = _best(self._rate(c + rest) for c in itertools.product(*levels[:few]))
        found = _hull(found) if self.layers > 1 else found
        for i in range(few, len(levels)):
            last = found[-1].what
            found.append(self._rate((*last[:i], len(levels[i]) - 1, *last[i + 1 :])))
        return found

    def _rate(self, combination: tuple[int, ...]) -> _Rated:
        """``combination`` in all layers, from one group of each kind."""
        chosen = [
            (members[len(members) // 2], level, len(members))
            for members, level in zip(self.kinds, combination, strict=True)
            if level
        ]
        freed = Freed()
        for group, level, _ in chosen:
            freed |= group.levels[level]
        done: set[Node] = set()
        saved, ms = 0, 0.0
        for group, level, count in chosen:
            gone = group.levels[level].gone
            again = self.kept.again(gone, freed).keys() - done
            done |= again
            saved += count * group.saved(level)
            ms += count * self._ms(again, gone)
        return _Rated(saved, ms, combination)


def _best(rated: Iterable[_Rated]) -> list[_Rated]:
    """Those that no other one beats in both, from the least saved to the most."""
    found: list[_Rated] = []
    for each in sorted(rated, key=lambda r: (-r.saved, r.ms)):
        if not found or each.ms < found[-1].ms:
            found.append(each)
    return found[::-1]


def _hull(points: Sequence[_Rated]) -> list[_Rated]:
    """The lower convex hull: mixes of layers reach what is between."""
    found: list[_Rated] = []
    for c in points:
        while len(found) > 1:
            a, b = found[-2:]
            if (b.ms - a.ms) * (c.saved - a.saved) < (c.ms - a.ms) * (b.saved - a.saved):
                break
            found.pop()
        found.append(c)
    return found


def _direct(node: Node) -> bool:
    """Does a heavy node compute ``node``, without an elementwise pass?"""
    return heavy(node) or any(map(heavy, node.all_input_nodes[:1]))
