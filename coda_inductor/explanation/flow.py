# SPDX-License-Identifier: Apache-2.0
"""One repeated block of a model as its kernels in order: what the page shows as cards.

The block is the middle one of the modules that repeat (``model.layers.8`` of 16), so that neither
the embedding before nor the head after is in it. A small model without repetition is one block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx
from torch.fx import Graph, Node

from coda_inductor.explanation import naming
from coda_inductor.explanation.kernels import Kernel, kernels, names
from coda_inductor.report import LAYER, SiteReport, readable_bytes, shape_text

MOST_KERNELS = 40  # more are no overview


@dataclass(frozen=True)
class Part:
    """A card: one kernel; "small" is memory-bound work on vectors. It ``reads`` so many bytes of
    whose results, parameters not listed, and has ``moved`` so many in all, these included."""

    kind: str
    title: str
    detail: str
    work: tuple[str, ...]
    reads: dict[str, int]
    note: str
    moved: int


@dataclass
class Block:
    """The kernels of module ``name`` (empty: of the whole model), "forward" or "backward"."""

    name: str
    direction: str
    parts: list[Part] = field(default_factory=list)

    @property
    def moved(self) -> int:
        return sum(part.moved for part in self.parts)

    @property
    def count(self) -> int:
        return len(self.parts)


def repeated(paths: Iterable[str]) -> str | None:
    """The module path of the middle one of the blocks that repeat; None if there are none.

    ``paths`` are the GEMMs' modules, each as often as it has GEMMs.
    """
    blocks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        if found := LAYER.search(path):
            blocks[path[: found.start()]][int(found[0])].append(path[found.end() :])
    best: tuple[int, str | None] = (0, None)
    for prefix, members in blocks.items():
        shapes = Counter(tuple(sorted(rests)) for rests in members.values())
        shape, times = shapes.most_common(1)[0]
        if times >= 2 and len(shape) >= 2 and times * len(shape) > best[0]:
            alike = sorted(i for i, rests in members.items() if tuple(sorted(rests)) == shape)
            best = (times * len(shape), f"{prefix}{alike[len(alike) // 2]}")
    return best[1]


def block(
    graph: Graph,
    name: str | None,
    sites: Sequence[SiteReport],
    *,
    backward: bool = False,
    saved: Sequence[Node] = (),
) -> Block | None:
    """The kernels of ``graph`` in module ``name`` (None: all of them); None if they are too many or
    there are none. ``saved``: the nodes that a forward graph leaves for the backward pass."""
    everything = kernels(graph)
    inside = [k for k in everything if not name or f"{k.path}.".startswith(f"{name}.")]
    if not inside or len(inside) > MOST_KERNELS:
        return None
    largest = max(k.bytes for k in inside)
    place = {k: i for i, k in enumerate(inside)}
    residuals = frozenset(s.site for s in sites if "residual" in s.patterns and not backward)
    owner = {node: k for k in everything for node in k.writes}
    order = nx.DiGraph()
    order.add_nodes_from(inside)
    order.add_edges_from((owner[n], k) for k in inside for n in k.reads if owner.get(n) in place)
    inside = list(nx.lexicographical_topological_sort(order, key=place.__getitem__))
    titles = {k: _words(k, largest, sites, residuals, backward) for k in inside}
    result = Block(name or "", "backward" if backward else "forward")
    for kernel, (kind, title, detail, work) in titles.items():
        reads: Counter[str] = Counter()
        for tensor, read in kernel.reads.items():
            if (owned := owner.get(tensor)) in titles:
                reads[titles[owned][1]] += read
            elif owned or "tangents" in str(tensor.target):
                reads["outside"] += read
        note = _note(kernel, largest, owner, frozenset(saved), backward)
        large = {source: n for source, n in reads.items() if n * 64 >= largest}
        result.parts.append(Part(kind, title, detail, work, large, note, kernel.bytes))
    return result


def _words(
    kernel: Kernel,
    most: int,
    sites: Sequence[SiteReport],
    residuals: frozenset[str],
    backward: bool,
) -> tuple[str, str, str, tuple[str, ...]]:
    """Kind, title, detail and the work of its epilogue."""
    if kernel.site is not None and kernel.site < len(sites):
        site = sites[kernel.site]
        work = tuple(naming.epilogue_work(site)) if kernel.kind == "fused" else ()
        return kernel.kind, naming.gemm_title(site), shape_text(site), work
    if kernel.kind == "gemm" and (found := naming.product(kernel, backward=backward)) is not None:
        return kernel.kind, *found, ()
    small = kernel.kind == "memory" and kernel.bytes * 32 < most  # vectors: rstd, partials
    title = naming.kernel_title(kernel, backward=backward, small=small, residuals=residuals)
    return "small" if small else kernel.kind, title, "", ()


def _note(
    kernel: Kernel, largest: int, owner: dict[Node, Kernel], saved: frozenset[Node], backward: bool
) -> str:
    """Bytes kept for the backward pass, or read of what was (parameters keep their name)."""
    if backward:
        found = {n: b for n, b in kernel.reads.items() if n not in owner and n.op == "placeholder"}
        own = ("primals", "tangents")
        count = sum(b for n, b in found.items() if not str(n.target).startswith(own))
        words = f"reads {readable_bytes(count)} kept"
    else:
        count = sum(b for n, b in kernel.writes.items() if saved.intersection(names(n)))
        words = f"keeps {readable_bytes(count)}"
    return words if count * 64 >= largest else ""
