# SPDX-License-Identifier: Apache-2.0
"""One repeated block of a model as a small graph of kernels: what the diagram shows.

The block is the middle one of the modules that repeat (``model.layers.8`` of 16), so that neither
the embedding before nor the head after is in it. A small model without repetition is one block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from coda_inductor.explanation.kernels import Kernel, base, kernels, names
from coda_inductor.explanation.naming import (
    epilogue_work,
    gemm_title,
    is_small,
    kernel_title,
    product,
    readable_bytes,
    shape_text,
)
from coda_inductor.fuse.traffic import size
from coda_inductor.report import SiteReport

#: More kernels than these are no picture.
MOST_KERNELS = 40


@dataclass(frozen=True)
class Part:
    """A box: a kernel, or (kind "outside") what lies before or after the block.

    Attributes:
        kind: "gemm", "fused", "attention", "memory", "small", "other" or "outside".
        work: what a fused kernel's epilogue does.
        note: bytes that come or go without an arrow (saved for the backward pass, or from it).
        moved: bytes that the kernel moves in all, parameters included.
    """

    key: str
    kind: str
    title: str
    detail: str = ""
    work: tuple[str, ...] = ()
    note: str = ""
    moved: int = 0


@dataclass(frozen=True)
class Arrow:
    """A tensor that one kernel writes and another reads; ``bytes`` is what is read."""

    source: str
    target: str
    bytes: int


@dataclass
class Block:
    """The kernels of one block in one direction.

    Attributes:
        name: the module, e.g. ``model.layers.8``; empty if it is the whole model.
        direction: "forward" or "backward".
    """

    name: str
    direction: str
    parts: list[Part] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)

    @property
    def moved(self) -> int:
        return sum(part.moved for part in self.parts)

    @property
    def count(self) -> int:
        """How many kernels run."""
        return sum(part.kind != "outside" for part in self.parts)


def repeated(paths: Iterable[str]) -> str | None:
    """The module path of the middle one of the blocks that repeat; None if there are none.

    ``paths`` are the GEMMs' modules, each as often as it has GEMMs.
    """
    blocks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        prefix, index, rest = split(path)
        if index is not None:
            blocks[prefix][index].append(rest)
    best: tuple[int, str] = (0, "")
    for prefix, members in blocks.items():
        shapes = Counter(tuple(sorted(rests)) for rests in members.values())
        shape, times = shapes.most_common(1)[0]
        if times < 2 or len(shape) < 2 or times * len(shape) <= best[0]:
            continue
        alike = sorted(i for i, rests in members.items() if tuple(sorted(rests)) == shape)
        best = (times * len(shape), f"{prefix}.{alike[len(alike) // 2]}".removeprefix("."))
    return best[1] or None


def split(path: str) -> tuple[str, int | None, str]:
    """``("model.layers", 3, "mlp.up_proj")`` for ``model.layers.3.mlp.up_proj``: at its first
    number. Without one: (path, None, "")."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return path, None, ""
    return ".".join(parts[:at]), int(parts[at]), ".".join(parts[at + 1 :])


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
    inside = [k for k in everything if name is None or _within(k.path, name)]
    if not inside or len(inside) > MOST_KERNELS:
        return None
    result = Block(name or "", "backward" if backward else "forward")
    largest = max(k.bytes for k in inside)
    owner = {node: k for k in everything for node in k.writes}
    keys = {k: f"k{i}" for i, k in enumerate(inside)}
    read_outside = {n for k in everything if k not in keys for n in k.reads}
    leaving = [n for k in inside for n in k.writes if n in read_outside]
    stream = max(map(size, leaving), default=0)  # the residual stream, or its gradient
    residuals = frozenset(s.site for s in sites if "residual" in s.patterns and not backward)
    arrows: Counter[tuple[str, str]] = Counter()  # one a pair of kernels
    sources: dict[Node, str] = {}
    for kernel in inside:
        for tensor, read in kernel.reads.items():
            producer = owner.get(tensor)
            if producer in keys:
                arrows[keys[producer], keys[kernel]] += read
            elif _arrives(tensor, producer, backward) and size(tensor) * 2 >= stream:
                key = sources.setdefault(tensor, f"in{len(sources)}")
                arrows[key, keys[kernel]] += read
    for tensor, key in sources.items():
        title = _origin(tensor, [k for k in inside if tensor in k.reads], backward, name)
        result.parts.append(Part(key, "outside", title))
    for kernel in inside:
        kind = "small" if is_small(kernel, largest) else kernel.kind
        words = _words(kernel, kind, sites, residuals, backward)
        note = _note(kernel, largest, owner, frozenset(saved), backward)
        result.parts.append(Part(keys[kernel], kind, *words, note, kernel.bytes))
        passed = sum(b for n, b in kernel.writes.items() if n in read_outside)
        if passed * 2 >= stream > 0:
            arrows[keys[kernel], "out"] += passed
    if any(target == "out" for _, target in arrows):
        after = "gradient for the layer before" if backward else "to the next layer"
        result.parts.append(Part("out", "outside", after if name else "output"))
    result.arrows = [Arrow(*ends, count) for ends, count in arrows.items()]
    return result


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _arrives(tensor: Node, producer: Kernel | None, backward: bool) -> bool:
    """Is a tensor from outside worth an arrow? Parameters and kept tensors are not."""
    return producer is not None or (backward and "tangents" in str(tensor.target))


def _origin(tensor: Node, readers: list[Kernel], backward: bool, name: str | None) -> str:
    if backward:
        return "gradient from the layer after" if name else "gradient of the output"
    if all(k.kind == "attention" or "softmax" in kernel_title(k, backward=False) for k in readers):
        return "attention mask"
    plain = any(k.kind == "gemm" for k in readers)
    factors = [base(a) for k in readers if k.kind == "fused" for a in k.nodes[0].args[0]]
    return "from the layer before" if plain or tensor in factors else "residual stream"


def _words(
    kernel: Kernel,
    kind: str,
    sites: Sequence[SiteReport],
    residuals: frozenset[str],
    backward: bool,
) -> tuple[str, str, tuple[str, ...]]:
    """Title, detail and the work of its epilogue."""
    if kernel.site is not None and kernel.site < len(sites):
        site = sites[kernel.site]
        work = tuple(epilogue_work(site)) if kernel.kind == "fused" else ()
        return gemm_title(site), shape_text(site), work
    if kernel.kind == "gemm" and (found := product(kernel, backward=backward)) is not None:
        return (*found, ())
    title = kernel_title(kernel, backward=backward, small=kind == "small", residuals=residuals)
    return title, f"moves {readable_bytes(kernel.bytes)}", ()


def _note(
    kernel: Kernel,
    largest: int,
    owner: dict[Node, Kernel],
    saved: frozenset[Node],
    backward: bool,
) -> str:
    """Bytes kept for the backward pass, or read of what was, where they count."""
    if backward:
        read = sum(b for n, b in kernel.reads.items() if n not in owner and _is_kept(n))
        return f"reads {readable_bytes(read)} kept" if read * 64 >= largest else ""
    kept = sum(b for n, b in kernel.writes.items() if saved.intersection(names(n)))
    return f"keeps {readable_bytes(kept)}" if kept * 64 >= largest else ""


def _is_kept(node: Node) -> bool:
    """An activation from the forward pass, not a parameter: parameters keep their name."""
    return node.op == "placeholder" and not str(node.target).startswith(("primals", "tangents"))
