# SPDX-License-Identifier: Apache-2.0
"""Find the cheapest choice of kept tensors that stays within a limit.

There is one chain of choices for a graph, each with fewer bytes and more milliseconds than the one
before, and a limit selects the first that fits. So less memory never takes less time, and more
memory never takes more. The chain comes from one layer: all combinations of levels of its groups
that no other combination beats in bytes and time. Between two of them the layers change one by one,
the earliest first: it is recomputed last, when the others' tensors are gone.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from coda_inductor.gpu import Gpu
from coda_inductor.graph.nodes import bytes_of
from coda_inductor.memory.candidates import Drop, Group, Stash, groups, heavy
from coda_inductor.memory.costs import install, milliseconds

#: Combinations of one layer that are compared; the smallest kinds, beyond them, are freed last.
_MOST = 1024
#: So many groups of one kind belong to layers, which change one by one.
_MANY = 4
#: A peak that is predicted to be lower by a smaller part may be higher: each prediction is right
#: within 2 %, because Inductor reorders (OLMoE: 6.95 GiB, predicted as 7.07).
DOUBT = 0.04


@dataclass(frozen=True)
class Choice:
    """The tensors that a graph keeps, and the cost of the choice.

    Attributes:
        drop: the tensors that are computed again.
        kept: bytes that the forward pass leaves, inputs of the graph apart.
        ms: the additional time: kernels that run again, and passes over elementwise results.
    """

    drop: Drop
    kept: int
    ms: float


class _Point(NamedTuple):
    """A way to keep less: the bytes saved, the milliseconds that it costs, and its position."""

    saved: int
    ms: float
    key: Any


class Chain:
    """All choices for one graph, from the most memory (no limit) to the least.

    Args:
        stash: the tensors that the graph keeps.
        gpu: the GPU for which times are compared.
    """

    def __init__(self, stash: Stash, gpu: Gpu):
        install()
        self.stash, self.gpu = stash, gpu
        self._time = functools.cache(lambda node: milliseconds(node, gpu))
        kinds: dict[object, list[Group]] = {}
        for group in groups(stash):
            kinds.setdefault(group.kind, []).append(group)
        by_kind = list(kinds.values())
        self.many = max(map(len, by_kind), default=1) >= _MANY
        if not self.many:  # not layers
            by_kind = [[group] for members in by_kind for group in members]
        self.kinds = sorted(by_kind, key=lambda k: -len(k) * k[0].size)
        self.layers = max(map(len, self.kinds), default=1)
        self.points = self._points()
        self.states = _best(self._states())

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, i: int) -> Choice:
        drop = Drop()
        for members, levels in zip(self.kinds, self._levels(*self.states[i].key), strict=True):
            for group, level in zip(members, levels, strict=True):
                drop |= group.levels[level]
        kept = bytes_of(*self.stash.tensors) - bytes_of(*drop.nodes) + bytes_of(*drop.proxies)
        return Choice(drop, kept, self._ms(self.stash.rerun(drop.nodes, drop), drop.nodes))

    def first(self, fits: Callable[[Choice], bool]) -> int | None:
        """The index of the first choice that ``fits``; None if none does."""
        last = len(self) - 1
        if not fits(self[last]):
            return None
        return bisect.bisect_left(range(last), True, key=lambda i: fits(self[i]))

    def fastest(self, peak: Callable[[Drop], int], index: int) -> int:
        """The index of a faster choice than ``index`` with no higher peak, or ``index``."""
        while index and peak(self[index - 1].drop) <= peak(self[index].drop):
            index -= 1
        return index

    def cut(self, peak: Callable[[Drop], int], doubt: float = 0.0) -> int:
        """Remove choices whose peak is not below the peak of a faster choice, by more than its
        fraction ``doubt``, because the tensors that they compute again are alive at once. Returns
        the least peak. Between two points, peaks follow the layers one by one."""
        ends = [i for i, state in enumerate(self.states) if not state.key[1]]
        rest, least = self.states[:1], peak(self[0].drop)

        def below(i: int) -> bool:
            return peak(self[i].drop) < least

        for here, after in itertools.pairwise(ends):
            if (value := peak(self[after].drop)) >= (1 - doubt) * least:
                continue
            between = range(here + 1, after + 1)
            rest += self.states[between[bisect.bisect_left(between, True, key=below)] : after + 1]
            least = value
        self.states = rest
        return least

    def _ms(self, nodes: Collection[Node], tensors: Iterable[Node]) -> float:
        # Not of tensors that heavy nodes compute without an elementwise pass.
        light = (n for n in tensors if n in nodes and not heavy(n))
        passes = 2 * bytes_of(*(n for n in light if not any(map(heavy, n.all_input_nodes[:1]))))
        return sum(map(self._time, filter(heavy, nodes))) + passes / self.gpu.bytes_per_us / 1000

    def _levels(self, point: int, done: int) -> list[list[int]]:
        here = self.points[point].key
        after = self.points[point + 1].key if done else here
        steps = self._changing_layers(point)
        levels = []
        for members, level, then in zip(self.kinds, here, after, strict=True):
            count = math.ceil(done * len(members) / steps)
            levels.append([then] * count + [level] * (len(members) - count))
        return levels

    def _changing_layers(self, point: int) -> int:
        """The number of layers that change from a point to the next one: the number of groups of
        the changing kinds. Other kinds have more groups: a layer has several norms, for example."""
        if point + 1 == len(self.points):
            return 1
        both = zip(self.kinds, self.points[point].key, self.points[point + 1].key, strict=True)
        return max(len(members) for members, here, after in both if here != after)

    def _states(self) -> Iterator[_Point]:
        saved = [[k[0].saved(level) for level in range(len(k[0].levels))] for k in self.kinds]
        for i, (here, after) in enumerate(itertools.pairwise([*self.points, self.points[-1]])):
            steps = self._changing_layers(i)
            slope = (after.ms - here.ms) / steps
            for done in range(steps):
                levels = self._levels(i, done)
                total = sum(by[n] for by, ns in zip(saved, levels, strict=True) for n in ns)
                yield _Point(total, here.ms + done * slope, (i, done))

    def _points(self) -> list[_Point]:
        levels = [range(len(k[0].levels)) for k in self.kinds]
        count = len(levels)
        while math.prod(map(len, levels[:count])) > _MOST:
            count -= 1
        rest = (0,) * (len(levels) - count)
        points = _best(self._rate(c + rest) for c in itertools.product(*levels[:count]))
        points = _hull(points) if self.layers > 1 else points
        for i in range(count, len(levels)):
            last = points[-1].key
            points.append(self._rate((*last[:i], len(levels[i]) - 1, *last[i + 1 :])))
        return points

    def _rate(self, combination: tuple[int, ...]) -> _Point:
        picks = [
            (members[len(members) // 2], level, len(members))
            for members, level in zip(self.kinds, combination, strict=True)
            if level
        ]
        drop = Drop()
        for group, level, _ in picks:
            drop |= group.levels[level]
        done: set[Node] = set()
        saved, ms = 0, 0.0
        for group, level, count in picks:
            tensors = group.levels[level].nodes
            nodes = self.stash.rerun(tensors, drop).keys() - done
            done |= nodes
            saved += count * group.saved(level)
            ms += count * self._ms(nodes, tensors)
        return _Point(saved, ms, combination)


def _best(points: Iterable[_Point]) -> list[_Point]:
    """The points that no other one beats in bytes and in time, from the least saved to the most."""
    best: list[_Point] = []
    for point in sorted(points, key=lambda r: (-r.saved, r.ms)):
        if not best or point.ms < best[-1].ms:
            best.append(point)
    return best[::-1]


def _hull(points: Sequence[_Point]) -> list[_Point]:
    """The lower convex hull: mixes of layers reach the points between its corners."""
    hull: list[_Point] = []
    for c in points:
        while len(hull) > 1:
            a, b = hull[-2:]
            if (b.ms - a.ms) * (c.saved - a.saved) < (c.ms - a.ms) * (b.saved - a.saved):
                break
            hull.pop()
        hull.append(c)
    return hull
