# SPDX-License-Identifier: Apache-2.0
"""Read one quantization in an aten graph, as torchao 0.18 writes it: the definition of the op
(``semantic.fp8.quantize_by``) is traced and compared, so that a chain with another eps or maximum
is another function. What it is of is read by hand: ``abs(x)``, and a maximum of it over ``dims``.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.compat import select_decomp_table, unset_fake_temporarily
from coda_inductor.graph.nodes import arguments, aten, converts, fake, is_transpose, renames
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, parts
from coda_inductor.semantic.fp8 import quantize, quantize_by

#: (power_of_two, divides, dtype of the maxima) of what torchao writes; in training the last does
#: not matter, for they are cast to float64.
_KINDS = (
    (False, False, torch.float32),
    (True, False, torch.float32),
    (False, True, torch.float32),
    (False, True, torch.bfloat16),
)
_REPEATS = (aten.repeat.default, aten.expand.default, aten.clone.default)


@dataclass(frozen=True)
class Chain:
    """One quantization.

    Attributes:
        q: the last node.
        x: what is quantized, as the chain reads it.
        dims: what the amax is taken over, counted from the front; none: everything.
        kind: the other arguments of ``quantize``.
        scale: the node that holds the scale.
        undone: is it the scale itself that undoes it in a product, and not its reciprocal?
    """

    q: Node
    x: Node
    dims: tuple[int, ...]
    kind: tuple[Any, ...]
    scale: Node | None
    undone: bool

    def is_undone_by(self, node: Node) -> bool:
        """Is ``node`` what undoes the scale, laid out in some way?"""
        node = base(node, relaid)
        if not self.undone and node.target is aten.reciprocal.default:
            return base(node.all_input_nodes[0], relaid) is self.scale
        return self.undone and node is self.scale


def relaid(node: Any) -> bool:
    """Are the elements of ``node``, a vector or a number that is repeated, those it reads?"""
    if isinstance(node, Node) and node.target in _REPEATS:
        return single(node.all_input_nodes[0])
    return renames(node) or (is_transpose(node) and 1 in fake(node).shape)


def single(node: Node) -> bool:
    """Is ``node`` one number, whatever its shape?"""
    return all(isinstance(size, int) and size == 1 for size in fake(node).shape)


def chain_of(q: Node) -> Chain | None:
    """The quantization that ends in ``q``, one of torchao's or of ours; None if it is neither."""
    if q.target is operator.getitem and q.all_input_nodes[0].target is quantize:
        both = q.all_input_nodes[0]
        x, dims, *how = arguments(both).values()
        return Chain(q, x, tuple(dims), tuple(how), parts(both).get(1), True)
    for power_of_two, divides, dtype in _KINDS if converts(q) else ():
        wide, amax, end, scale = _definition(fake(q).dtype, power_of_two, divides, dtype)
        found: dict[Node, Any] = {}
        if not _alike(end, q, found) or (maximum := _maximum(found[amax])) is None:
            continue
        x, dims = maximum
        source = found[wide]
        if converts(source) and source is not base(x):
            source = base(source.all_input_nodes[0])
        if source is base(x) and same(fake(x).shape, fake(q).shape):
            dims = _all_but_ones(dims, fake(x).shape) if divides else dims
            kind = fake(q).dtype, power_of_two, divides
            return Chain(q, x, dims, kind, found[scale], divides)
    return None


@functools.lru_cache(maxsize=32)
def _definition(
    dtype: torch.dtype, power_of_two: bool, divides: bool, maxima: torch.dtype
) -> list[Node]:
    """What ``quantize_by`` is traced to: the nodes of x and of its maxima, of its results."""

    def chain(wide: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        return quantize_by(wide, amax, dtype, power_of_two, divides)

    with unset_fake_temporarily():
        table, x = select_decomp_table(), torch.empty(2, 3)
        graph = make_fx(chain, decomposition_table=table)(x, x[:, :1].to(maxima)).graph
    return [*graph.find_nodes(op="placeholder"), *graph.output_node().args[0]]


def _alike(pattern: Any, node: Any, found: dict[Node, Any]) -> bool:
    """Is ``node`` computed as ``pattern`` is, up to views? ``found``: what each of its nodes is."""
    node = base(node)
    if not isinstance(pattern, Node) or pattern in found:
        return found.get(pattern, pattern) == node
    found[pattern] = node
    if pattern.op == "placeholder":
        return isinstance(node, Node)
    if not isinstance(node, Node) or node.target is not pattern.target or node.kwargs:
        return False
    pairs = zip(pattern.args, node.args, strict=False)
    return len(pattern.args) == len(node.args) and all(_alike(*pair, found) for pair in pairs)


def _all_but_ones(dims: tuple[int, ...], shape: Any) -> tuple[int, ...]:
    """``dims``, or none where the maximum is over everything: in inference torchao leaves out
    dimensions of size one, a batch of one for instance."""
    others = [size for dim, size in enumerate(shape) if dim not in dims]
    everything = all(isinstance(size, int) and size == 1 for size in others)
    return () if everything and dims != (len(shape) - 1,) else dims


def _maximum(amax: Any) -> tuple[Node, tuple[int, ...]] | None:
    """(x, dims) of the node that holds the maximum of abs(x) over ``dims``, and keeps these."""
    if not isinstance(amax, Node) or amax.target not in (aten.max.default, aten.amax.default):
        return None
    given = arguments(amax)
    magnitude, dims = given["input"], given.get("dim") or ()
    if magnitude.target is not aten.abs.default or bool(dims) != bool(given.get("keepdim")):
        return None
    (x,) = magnitude.all_input_nodes
    return x, tuple(sorted(d % fake(x).dim() for d in dims))
