# SPDX-License-Identifier: Apache-2.0
"""Read one quantization in an aten graph, as torchao 0.18 writes it: the definition of the op
(``semantic.fp8.quantize_by``) is traced and compared, so that a chain with another eps or maximum
is another function. What it is of is read by hand: ``abs(x)``, and a maximum of it over ``dims``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.compat import select_decomp_table, to_copy, unset_fake_temporarily
from coda_inductor.graph.nodes import aten, fake, prims
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base
from coda_inductor.semantic.fp8 import FP8, quantize_by

#: (power_of_two, divides, dtype of the maxima) of what torchao writes; in training the last does
#: not matter, for they are cast to float64.
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
        x: what is quantized, as the chain reads it.
        dims: what the amax is taken over, counted from the front; none: everything.
        dtype: of the result, in FP8.
        power_of_two: whether the scale is rounded down to one.
        divides: whether x is divided by the scale, as in inference.
        magnitude: the first node, ``abs(x)``.
        scale: the node that holds the scale.
        q: the last node.
    """

    x: Node
    dims: tuple[int, ...]
    dtype: torch.dtype
    power_of_two: bool
    divides: bool
    magnitude: Node
    scale: Node
    q: Node


def is_fp8(node: Any) -> bool:
    """Is ``node`` a tensor in FP8?"""
    return isinstance(fake(node), torch.Tensor) and fake(node).dtype in FP8


def casts_to_fp8(node: Node) -> bool:
    """Does ``node`` cast to FP8?"""
    return converts(node) and is_fp8(node) and not is_fp8(node.args[0])


def converts(node: Any) -> bool:
    """Does ``node`` change the dtype of what it reads, and nothing else? As ``is_cast``, for every
    dtype."""
    if not isinstance(node, Node) or node.target not in (
        prims.convert_element_type.default,
        to_copy,
    ):
        return False
    before, after = fake(node.args[0]), fake(node)
    return before.device == after.device and before.dtype != after.dtype


def chain_of(q: Node) -> Chain | None:
    """The quantization that ends in the cast ``q``; None if it is not one of torchao's."""
    for power_of_two, divides, dtype in _KINDS:
        wide, amax, end, scale = _definition(fake(q).dtype, power_of_two, divides, dtype)
        found: dict[Node, Any] = {}
        if not _alike(end, q, found) or (maximum := _maximum(found[amax])) is None:
            continue
        magnitude, dims = maximum
        x, source = magnitude.args[0], found[wide]
        if converts(source) and source is not base(x):
            source = base(source.args[0])
        if source is base(x) and same(fake(x).shape, fake(q).shape):
            dims = _all_but_ones(dims, fake(x).shape) if divides else dims
            return Chain(x, dims, fake(q).dtype, power_of_two, divides, magnitude, found[scale], q)
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
    """(abs(x), dims) of the node that holds its maximum over ``dims``."""
    magnitude = amax.args[0] if isinstance(amax, Node) and amax.args else None
    if not isinstance(magnitude, Node) or magnitude.target is not aten.abs.default:
        return None
    dims = _dims(amax, fake(magnitude).dim())
    return None if dims is None else (magnitude, dims)


def _dims(amax: Node, rank: int) -> tuple[int, ...] | None:
    """What ``amax`` is the maximum over; None if it is none, or does not keep its dimensions."""
    if amax.target is aten.max.default:
        return ()
    if amax.target is not aten.amax.default:
        return None
    dims = amax.args[1] if len(amax.args) > 1 else []
    keep = len(amax.args) > 2 and amax.args[2]
    if bool(dims) != keep:  # all of them: torch keeps none; some: torchao keeps them
        return None
    return tuple(sorted(d % rank for d in dims))
