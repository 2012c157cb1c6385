# SPDX-License-Identifier: Apache-2.0
"""Read one quantization in an aten graph, as torchao 0.18 writes it. In training::

    m = amax(abs(x), dims, keepdim)                            or max(abs(x)), of everything
    scale = float32(reciprocal(clamp_min(float64(m), 1e-12)) * max)     [exp2(floor(log2(scale)))]
    q = float8(clamp_max(clamp_min(float32(x) * scale, -max), max))

and in inference::

    scale = float32(amax(abs(x), dims, keepdim) / max)
    q = float8(clamp_max(clamp_min(float32(x) / scale, -max), max))

Every number is compared: a chain with another eps or maximum is another function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import to_copy
from coda_inductor.graph.nodes import aten, base, fake, prims, renames
from coda_inductor.graph.sizes import same
from coda_inductor.semantic.fp8 import EPS, FP8

_HALVES = (torch.bfloat16, torch.float16)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


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
    dtype = fake(q).dtype
    limit = torch.finfo(dtype).max
    product, bounds = clamped(q.args[0])
    divides = product.target is aten.div.Tensor
    if bounds != (-limit, limit) or not (divides or product.target is aten.mul.Tensor):
        return None
    for wide, scale in (product.args, product.args[::-1])[: 1 if divides else 2]:
        if not isinstance(wide, Node) or not isinstance(scale, Node):
            return None
        if fake(wide).dtype != torch.float32 or not same(fake(product).shape, fake(wide).shape):
            continue
        found = (_divisor if divides else _scale)(scale, limit)
        if found is None:
            continue
        magnitude, dims, power_of_two = found
        x = magnitude.args[0]
        source = base(wide.args[0]) if converts(wide) and base(wide) is not base(x) else base(wide)
        if source is base(x) and same(fake(x).shape, fake(wide).shape):
            return Chain(x, dims, dtype, power_of_two, divides, magnitude, scale, q)
    return None


def clamped(node: Node) -> tuple[Node, tuple[float | None, float | None]]:
    """What ``node`` clamps, and to which bounds: (None, None) where it clamps nothing."""
    low: float | None = None
    high: float | None = None
    while isinstance(node, Node) and node.target in _CLAMPS and not node.kwargs:
        numbers = [*node.args[1:], None]
        if node.target is aten.clamp_max.default:
            numbers = [None, node.args[1]]
        if any(isinstance(n, Node) for n in numbers):
            break
        if (numbers[0] is not None and low is not None) or (numbers[1] is not None and high):
            break
        low = numbers[0] if low is None else low
        high = numbers[1] if high is None else high
        node = node.args[0]
    return node, (low, high)


def _scale(node: Node, limit: float) -> tuple[Node, tuple[int, ...], bool] | None:
    """(abs(x), dims, whether it is a power of two) of the node that holds a scale."""
    power_of_two = node.target is aten.exp2.default
    if power_of_two:
        node = _through(node, aten.exp2.default, aten.floor.default, aten.log2.default)
    if node is None or not converts(node) or fake(node).dtype != torch.float32:
        return None
    product = node.args[0]
    if product.target not in (aten.mul.Tensor, aten.mul.Scalar) or product.args[1] != limit:
        return None
    least = _through(product.args[0], aten.reciprocal.default)
    if least is None:
        return None
    wide, bounds = clamped(least)
    if bounds != (EPS, None) or not converts(wide) or fake(wide).dtype != torch.float64:
        return None
    found = _maximum(wide.args[0])
    return None if found is None else (*found, power_of_two)


def _divisor(node: Node, limit: float) -> tuple[Node, tuple[int, ...], bool] | None:
    """The same, of the node that holds what inference divides by."""
    if fake(node).dtype != torch.float32:
        return None
    while renames(node) or (converts(node) and fake(node.args[0]).dtype in _HALVES):
        node = node.args[0]
    if node.target is not aten.div.Tensor or node.args[1] != limit:
        return None
    found = _maximum(node.args[0])
    if found is None:
        return None
    magnitude, dims = found
    shape = fake(magnitude).shape
    # torchao leaves out dimensions of size one, a batch of one for instance.
    others = [size for dim, size in enumerate(shape) if dim not in dims]
    everything = all(isinstance(size, int) and size == 1 for size in others)
    by_rows = dims == (len(shape) - 1,)
    return magnitude, () if everything and not by_rows else dims, False


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


def _through(node: Any, *targets: Any) -> Any:
    """What a chain of unary ops, the last one first, is computed from; None if it is another."""
    for target in targets:
        if not isinstance(node, Node) or node.target is not target:
            return None
        node = node.args[0]
    return node
