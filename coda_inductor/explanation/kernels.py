# SPDX-License-Identifier: Apache-2.0
"""Which kernels a graph would run as, and what each moves through memory: a model of Inductor.

GEMMs, attention, fused sites and whatever is not elementwise are a kernel each. Elementwise ops,
casts and reductions join the kernel of the producer that they read most from, if they run over the
same elements (or over the rows that it reduced to) and no path leads out of that kernel and back.
Views and constants cost nothing. A kernel reads each tensor once and writes each result that
another kernel, or the caller, reads.

This is an account, not a measurement: Inductor also recomputes cheap values and finds some of its
inputs in a cache. What is missing is missing before and after alike.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import log_softmax, schema, softmax, to_copy
from coda_inductor.fuse.columns import COLUMNS
from coda_inductor.fuse.traffic import size
from coda_inductor.fusing.lower import SITE
from coda_inductor.graph import walk
from coda_inductor.graph.gemms import GEMMS
from coda_inductor.graph.nodes import ALIASES, arguments, aten, fake, is_cast, module_path
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import closure, readers

_PRODUCTS = (*GEMMS, aten.bmm.default, aten.baddbmm.default)
#: Not tagged as pointwise, but Inductor's kernels compute them all the same.
_ALSO = frozenset(
    {
        aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default,
        aten.amin.default, aten.var_mean.correction, aten.var.correction, aten.any.dim,
        aten.any.default, aten.all.default, aten.argmax.default, aten.prod.dim_int,
        softmax, log_softmax, aten.cumsum.default, aten.cat.default, COLUMNS,
        aten.index.Tensor, aten.embedding.default, aten.gather.default, aten.clone.default,
        aten.constant_pad_nd.default, aten.slice_scatter.default, aten.select_scatter.default,
        aten.copy_.default, aten.native_layer_norm.default, aten.repeat.default, aten.flip.default,
        aten.native_dropout.default, aten.bernoulli.p, aten.rand_like.default,
        torch.ops.prims.rev.default,
        to_copy, torch.ops.prims.convert_element_type.default,
    }
)  # fmt: skip
#: They read as much of their table as they write.
_GATHERS = (aten.index.Tensor, aten.embedding.default, aten.gather.default)
#: What runs over this many times fewer elements than its only reader costs no pass of its own.
_FEW = 8


@dataclass(eq=False)
class Kernel:
    """One kernel: its nodes in order, and bytes read and written by tensor.

    Attributes:
        kind: "gemm", "fused", "attention", "memory" (elementwise and reductions) or "other".
        space: elements that it runs over.
        inner: bytes that travel between the launches of an op that is several of them.
    """

    kind: str
    nodes: list[Node] = field(default_factory=list)
    space: int = 0
    reads: dict[Node, int] = field(default_factory=dict)
    writes: dict[Node, int] = field(default_factory=dict)
    inner: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values()) + self.inner

    @functools.cached_property
    def targets(self) -> Counter[str]:
        """How often each op occurs: ``{"mul": 2, "rsqrt": 1}``."""
        return Counter(str(n.target).split(".")[1] for n in self.nodes if "." in str(n.target))

    @property
    def path(self) -> str:
        """The module that its first op came from."""
        return next((p for p in map(module_path, self.nodes) if p), "")

    @property
    def site(self) -> int | None:
        """The number of the report that it is of, for GEMMs and fused sites."""
        return self.nodes[0].meta.get(SITE)


def kernels(graph: Graph) -> list[Kernel]:
    """The kernels of an aten graph (an inference graph, or one side of a partitioned one)."""
    grouping = _Grouping(graph)
    for kernel in grouping.found:
        for node in kernel.nodes:
            _read(kernel, node, grouping.owner)
            kernel.inner += _inside(node)
            elsewhere = any(grouping.owner.get(u) is not kernel for u in _users(node))
            if elsewhere and not _tuple(node):
                kernel.writes[node] = size(node)
    return grouping.found


def base(node: Node) -> Node:
    """The tensor in memory that ``node`` is a view of."""
    return walk.base(node, _is_free)


def names(node: Node) -> list[Node]:
    """``node`` and all views of it."""
    return readers(node, through=_is_free)[0]


class _Grouping:
    """Puts every node that does something into a kernel, then merges kernels as Inductor would."""

    def __init__(self, graph: Graph):
        self.found: list[Kernel] = []
        self.owner: dict[Node, Kernel] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if node.op == "call_function" and not _is_view(node):
                self._place(node)
        while self._merge():
            pass

    def _place(self, node: Node) -> None:
        if node.target is operator.getitem:
            kernel = self.owner.get(node.all_input_nodes[0])
        elif not _has_tensor(node) or not _inputs(node):
            return  # a size, or what every kernel can make for itself
        else:
            kernel = Kernel(_kind(node))
            self.found.append(kernel)
        if kernel is not None:
            kernel.nodes.append(node)
            kernel.space = max(kernel.space, _space(node))
            self.owner[node] = kernel

    def _merge(self) -> bool:
        """Merge each kernel into a producer where that is possible; was there any?"""
        before = len(self.found)
        for kernel in [k for k in self.found if k.kind == "memory"]:
            producers = self._producers(kernel)
            others = [k for k in producers if _alike(k, kernel)] + self._siblings(kernel)
            for other in others:
                inputs = [k for k in producers if k is not other]
                if other.kind == "memory" and not (
                    self._reaches(other, inputs) or self._reaches(kernel, self._producers(other))
                ):
                    self._absorb(other, kernel)
                    break
        self.found = [k for k in self.found if k.nodes]
        return len(self.found) < before

    def _absorb(self, into: Kernel, kernel: Kernel) -> None:
        into.nodes = sorted((*into.nodes, *kernel.nodes), key=self.order.__getitem__)
        into.space = max(into.space, kernel.space)
        self.owner.update(dict.fromkeys(kernel.nodes, into))
        kernel.nodes = []

    def _producers(self, kernel: Kernel) -> list[Kernel]:
        """The other kernels that it reads from, the one with most bytes first."""
        sources = sorted((i for n in kernel.nodes for i in _inputs(n)), key=size, reverse=True)
        found = dict.fromkeys(self.owner[i] for i in sources if i in self.owner)
        return [k for k in found if k is not kernel]

    def _siblings(self, kernel: Kernel) -> list[Kernel]:
        """Kernels before it that run over the same elements and read one of its large inputs:
        Inductor fuses these side by side, to read it once."""
        large = {i for n in kernel.nodes for i in _inputs(n) if _out(i) == kernel.space}
        users = (user for source in large for name in names(source) for user in name.users)
        found = dict.fromkeys(self.owner[user] for user in users if user in self.owner)
        first = self.order[kernel.nodes[0]]
        alike = (k for k in found if k.space == kernel.space and k is not kernel)
        return [k for k in alike if self.order[k.nodes[0]] < first]

    def _reaches(self, start: Kernel, ends: list[Kernel]) -> bool:
        """Does one of ``ends`` depend on ``start``?"""
        first = self.order[start.nodes[0]]
        before = closure(
            ends, lambda k: self._producers(k) if self.order[k.nodes[-1]] > first else ()
        )
        return start in before


def _alike(first: Kernel, then: Kernel) -> bool:
    """Do both run over the same elements, or the smaller over what the larger reduces to or alone
    reads, or (rotary's halves) over parts of them?"""
    low, high = sorted((first.space, then.space))
    if high <= 2 * low:
        return True
    if then.space == low:
        return any(_space(n) > _out(n) == low for n in first.nodes)
    inside = {*first.nodes, *then.nodes}
    return low * _FEW <= high and all(u in inside for n in first.nodes for u in _users(n))


def _read(kernel: Kernel, node: Node, owner: dict[Node, Kernel]) -> None:
    if node.target is operator.getitem:
        return
    for arg in node.all_input_nodes:
        source = base(arg)
        if not _has_tensor(source) or owner.get(source) is kernel or _constant(source):
            continue
        read = min(size(arg), size(source))
        if node.target in _GATHERS and arg is node.all_input_nodes[0]:
            read = min(read, size(node))
        kernel.reads[source] = max(read, kernel.reads.get(source, 0))


def _inside(node: Node) -> int:
    """The gradient of the logits that is made and used in slices: written, and read for each
    result."""
    if node.target is not torch.ops.coda_inductor.linear_cross_entropy_backward.default:
        return 0
    given = arguments(node)
    results = (given["weight"] is not None, given["x"] is not None, given["bias"])
    return size(given["logits"]) * (1 + sum(results))


def _users(node: Node) -> list[Node]:
    """What reads ``node`` or a view of it."""
    return readers(node, through=_is_free)[1]


def _is_free(node: Node) -> bool:
    """Is ``node`` a view, or a part of what a view returns?"""
    return _is_view(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _is_view(node: Node) -> bool:
    """Does ``node`` cost nothing? A widening cast happens where its result is read."""
    if node.target in ALIASES:
        return True
    if is_cast(node):
        return size(node) >= size(node.all_input_nodes[0])
    said = schema(node.target)
    if said is None or not said.returns:
        return False
    alias = said.returns[0].alias_info
    return alias is not None and not alias.is_write


def _inputs(node: Node) -> list[Node]:
    found = [base(n) for n in node.all_input_nodes]
    return [n for n in found if _has_tensor(n) and not _constant(n)]


def _constant(node: Node) -> bool:
    """Made of nothing: ``full``, ``arange`` and the like."""
    return node.op == "call_function" and not any(map(_has_tensor, node.all_input_nodes))


def _has_tensor(node: Node) -> bool:
    return isinstance(fake(node), torch.Tensor) or _tuple(node)


def _tuple(node: Node) -> bool:
    return isinstance(fake(node), (tuple, list))


def _kind(node: Node) -> str:
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if pointwise or node.target in _ALSO:
        return "memory"
    if node.target in _PRODUCTS:
        return "gemm"
    if node.target is torch.ops.coda_inductor.gemm_epilogue.default:
        return "fused"
    called = node.op == "call_function" and "_attention" in str(node.target)
    return "attention" if called else "other"


def _out(node: Node) -> int:
    """Elements that an op writes, of its largest result."""
    value = fake(node)
    tensors = value if isinstance(value, (tuple, list)) else [value]
    return max(
        (math.prod(map(hint, t.shape)) for t in tensors if isinstance(t, torch.Tensor)), default=0
    )


def _space(node: Node) -> int:
    """Elements that an op runs over: a reduction over those of its input."""
    if node.target is operator.getitem or node.target in _GATHERS:
        return _out(node)
    inputs = [n for n in node.all_input_nodes if not _tuple(n)]
    return max(map(_out, (node, *inputs)))
