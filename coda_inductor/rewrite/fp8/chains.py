# SPDX-License-Identifier: Apache-2.0
"""Recognize one quantization in an aten graph, as torchao 0.18 or nanochat writes it. The
definition of the op (``semantic.fp8.quantize_by``) is traced and compared, so that a chain with
another eps or maximum does not match. Its input is read separately: ``abs(x)``, its maximum.
"""

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
from coda_inductor.graph.read import kind
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, parts
from coda_inductor.program.dtypes import HALF
from coda_inductor.semantic.fp8 import KIND, quantize, quantize_by

#: (power_of_two, divides, dtype of the maxima) of what torchao writes; in training the dtype does
#: not matter, because the maxima are cast to float64.
_KINDS = (
    (False, False, torch.float32),
    (True, False, torch.float32),
    (False, True, torch.float32),
    (False, True, torch.bfloat16),
)


@dataclass(frozen=True)
class Chain:
    """One quantization.

    Attributes:
        q: the last node.
        x: the quantized tensor, as the chain reads it.
        dims: the dimensions of the amax, counted from the front; empty for all.
        kind: the other arguments of ``quantize``.
        scale: the node that holds the scale.
        undone: does a product undo it with the scale itself, not with its reciprocal?
    """

    q: Node
    x: Node
    dims: tuple[int, ...]
    kind: tuple[Any, ...]
    scale: Node | None
    undone: bool

    def is_undone_by(self, node: Node) -> bool:
        """Does ``node``, in any layout, undo the scale of this quantization?"""
        node = base(node, relaid)
        if not self.undone and node.target is aten.reciprocal.default:
            return base(node.all_input_nodes[0], relaid) is self.scale
        return self.undone and node is self.scale


def relaid(node: Any) -> bool:
    """Does ``node`` only repeat or rearrange a vector or number?"""
    if kind(node) in ("repeats", "copies"):
        return single(node.all_input_nodes[0])
    return renames(node) or (is_transpose(node) and 1 in fake(node).shape)


def single(node: Node) -> bool:
    """Is ``node`` a single number, in any shape?"""
    return all(isinstance(size, int) and size == 1 for size in fake(node).shape)


def chain_of(q: Node) -> Chain | None:
    """The quantization that ends in ``q``, torchao's or ours; None if none ends there."""
    if q.target is operator.getitem and q.all_input_nodes[0].target is quantize:
        op = q.all_input_nodes[0]
        args = arguments(op)
        kind = tuple(args[name] for name in KIND)
        return Chain(q, args["x"], tuple(args["dims"]), kind, parts(op).get(1), True)
    for power_of_two, divides, dtype in _KINDS if converts(q) else ():
        wide, amax, end, scale = _definition(fake(q).dtype, power_of_two, divides, dtype)
        nodes: dict[Node, Any] = {}
        if not _matches(end, q, nodes) or (maximum := _maximum(nodes[amax])) is None:
            continue
        x, dims = maximum
        if not divides and converts(x) and fake(x.all_input_nodes[0]).dtype in HALF:
            (x,) = x.all_input_nodes  # nanochat's: the maximum in float32 is the same number
        source = nodes[wide]
        if converts(source) and source is not base(x):
            source = base(source.all_input_nodes[0])
        if source is base(x) and same(fake(x).shape, fake(q).shape):
            dims = _all_but_ones(dims, fake(x).shape) if divides else dims
            kind = fake(q).dtype, power_of_two, divides
            return Chain(q, x, dims, kind, nodes[scale], divides)
    return None


@functools.lru_cache(maxsize=32)
def _definition(
    dtype: torch.dtype, power_of_two: bool, divides: bool, maxima: torch.dtype
) -> list[Node]:

    def chain(wide: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        return quantize_by(wide, amax, dtype, power_of_two, divides)

    with unset_fake_temporarily():
        table, x = select_decomp_table(), torch.empty(2, 3)
        graph = make_fx(chain, decomposition_table=table)(x, x[:, :1].to(maxima)).graph
    return [*graph.find_nodes(op="placeholder"), *graph.output_node().args[0]]


def _matches(pattern: Any, node: Any, nodes: dict[Node, Any]) -> bool:
    """Is ``node`` computed like ``pattern``, up to views? ``nodes``: pattern node -> graph node."""
    node = base(node)
    if not isinstance(pattern, Node) or pattern in nodes:
        return nodes.get(pattern, pattern) == node
    nodes[pattern] = node
    if pattern.op == "placeholder":
        return isinstance(node, Node)
    if not isinstance(node, Node) or node.target is not pattern.target or node.kwargs:
        return False
    pairs = zip(pattern.args, node.args, strict=False)
    return len(pattern.args) == len(node.args) and all(_matches(*pair, nodes) for pair in pairs)


def _all_but_ones(dims: tuple[int, ...], shape: Any) -> tuple[int, ...]:
    """``dims``; empty if the maximum is over all elements, because torchao omits dimensions of size
    1 in inference, for example a batch of one."""
    others = [size for dim, size in enumerate(shape) if dim not in dims]
    everything = all(isinstance(size, int) and size == 1 for size in others)
    return () if everything and dims != (len(shape) - 1,) else dims


def _maximum(amax: Any) -> tuple[Node, tuple[int, ...]] | None:
    """(x, dims) if ``amax`` is the maximum of abs(x) over ``dims``, which it keeps; else None."""
    if not isinstance(amax, Node) or amax.target not in (aten.max.default, aten.amax.default):
        return None
    args = arguments(amax)
    magnitude, dims = args["input"], args.get("dim") or ()
    if magnitude.target is not aten.abs.default or bool(dims) != bool(args.get("keepdim")):
        return None
    (x,) = magnitude.all_input_nodes
    return x, tuple(sorted(d % fake(x).dim() for d in dims))
