# SPDX-License-Identifier: Apache-2.0
"""The cheapest choice of what is kept that stays within a limit.

Candidates have a fixed order, by milliseconds a byte (``candidates``), and a choice is a prefix of
it: the shortest one within the limit. So less memory never takes less time, and more memory never
takes more. If a longer prefix has a higher predicted peak, because what it computes again is alive
together with what is left, the search continues behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from coda_inductor.graph.nodes import fake
from coda_inductor.memory.candidates import Candidate, Kept, heavy
from coda_inductor.memory.costs import milliseconds, size
from coda_inductor.select.device import Gpu


@dataclass(frozen=True)
class Choice:
    """What a graph keeps, and what that costs.

    Attributes:
        gone: tensors that are computed again.
        again: the nodes that run again for them, in the graph's order.
        kept: bytes that the forward pass leaves, inputs of the graph apart.
        before: the same without recomputation.
        ms: how long the heavy nodes of ``again`` take.
    """

    gone: tuple[Node, ...]
    again: tuple[Node, ...]
    kept: int
    before: int
    ms: float


def choose(
    kept: Kept, order: Sequence[Candidate], fits: Callable[[Choice], bool], gpu: Gpu
) -> Choice | None:
    """The shortest prefix of ``order`` that ``fits``; None if there is none. A step frees all
    tensors of equal price in one layer, because they come from one kernel."""
    ends = _ends(order)
    if not fits(choice(kept, _nodes(order, ends[-1]), gpu)):
        # The last prefix is not always the smallest peak.
        found = (choice(kept, _nodes(order, end), gpu) for end in ends)
        return next((each for each in found if fits(each)), None)
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(choice(kept, _nodes(order, ends[middle]), gpu)):
            high = middle
        else:
            low = middle + 1
    return choice(kept, _nodes(order, ends[low]), gpu)


def least(order: Sequence[Candidate], peak: Callable[[Sequence[Node]], int]) -> int:
    """The smallest peak of all prefixes."""
    return min(peak(_nodes(order, end)) for end in _ends(order))


def _ends(order: Sequence[Candidate]) -> list[int]:
    """The lengths of prefixes: tensors that the same nodes compute are freed together."""
    ends = [i for i, c in enumerate(order) if i and c.again != order[i - 1].again]
    return sorted({0, *ends, len(order)})


def _nodes(order: Sequence[Candidate], end: int) -> list[Node]:
    return [each.node for each in order[:end]]


def choice(kept: Kept, gone: Sequence[Node], gpu: Gpu) -> Choice:
    """The choice to free ``gone``."""
    freed = set(gone)
    again = kept.again(gone, freed)
    total = sum(size(fake(n)) for n in kept.kept)
    left = total - sum(size(fake(n)) for n in freed)
    ms = sum(milliseconds(n, gpu) for n in again if heavy(n))
    return Choice(tuple(gone), tuple(sorted(again)), left, total, ms)
