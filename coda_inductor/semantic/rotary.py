# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings in the semantic vocabulary: by tables of cosines and sines, or, for neighboring
pairs, by complex numbers, for which Inductor generates no code."""

from typing import Any

import torch
from torch import Tensor

from coda_inductor.semantic.define import CROSSING, LINEAR, WORDS, compose, define, statistics_dtype

WORDS |= dict.fromkeys(("rotary", "rotate"), "a rotary embedding")


def rotate_definition(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    distance: int,
    paired: bool,
    inverse: bool,
    joined: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Rotate ``x`` (..., D) by tables ``cos`` and ``sin`` (..., W) that broadcast against it.

    For columns a and b at ``distance`` from each other, in blocks of twice the distance, y = x *
    cos + (-b, a) * sin. Halves of W (Hugging Face's ``rotate_half``) have the distance W / 2,
    neighboring pairs 1. ``paired``: the tables (..., W / 2) hold one angle per pair. ``inverse``:
    the transposed map, dy * cos - turn(dy * sin): back, if both columns of a pair have one angle.

    ``joined``: only the first W columns are rotated; the others, if there are any, are copied, and
    the result has the layout that Inductor gives ``torch.cat`` of both, or of the halves of pairs
    with one angle. If a part has no columns, Inductor drops the cat, and so its layout.
    Computed in float32 (float64 for float64), cast to ``out_dtype``. Source: Su et al., "RoFormer"
    (arXiv 2104.09864), section 3.4.2.
    """
    wide = statistics_dtype(x.dtype)
    cos, sin = (each_column(t.to(wide), distance, paired) for t in (cos, sin))
    width = cos.shape[-1]
    part = x[..., :width] if joined else x
    # The pairs are turned before they are cast: what two nodes read, Inductor may store.
    if inverse:
        rotated = part.to(wide) * cos - turn(part.to(wide) * sin, distance)
    elif width == 2 * distance:
        # As models write it: 34 us where a permutation takes 54 (8192 x 32 heads of 128, H200).
        # Inductor counts more reads, but the input of attention is stored in any case.
        a, b = part.chunk(2, -1)
        rotated = part.to(wide) * cos + torch.cat((-b, a), -1).to(wide) * sin
    else:
        rotated = part.to(wide) * cos + turn(part, distance).to(wide) * sin
    rotated = rotated.to(out_dtype)
    if not joined:
        return rotated
    if paired and width == x.shape[-1]:
        return rotated.contiguous()
    return torch.cat((rotated, x[..., width:].to(out_dtype)), -1)


def each_column(table: Tensor, distance: int, paired: bool) -> Tensor:
    """``table``, (..., W), or (..., W / 2) with one column for each pair, as (..., W)."""
    if not paired:
        return table
    blocks = table.unflatten(-1, (-1, 1, distance))
    return blocks.expand(*blocks.shape[:-2], 2, distance).flatten(-3)


def turn(x: Tensor, distance: int) -> Tensor:
    """(-b, a) for each pair of columns (a, b).

    The result is a permutation with computed signs, so every element is read once. With a ``cat``
    of two slices Inductor counts more reads, and then stores a rotation that two kernels read.
    """
    signs = 2 * torch.arange(2, dtype=x.dtype, device=x.device) - 1
    return (exchange(x, distance).unflatten(-1, (-1, 2, distance)) * signs[:, None]).flatten(-3)


def exchange(x: Tensor, distance: int) -> Tensor:
    """(b, a) for each pair of columns (a, b)."""
    return x.unflatten(-1, (-1, 2, distance)).flip(-2).flatten(-3)


def _turn_back(dy, x, cos, sin, distance, paired, inverse, joined):
    return rotate(dy, cos, sin, distance, paired, not inverse, joined, x.dtype)


rotate = define(
    "rotate(Tensor x, Tensor cos, Tensor sin, int distance, bool paired, bool inverse, "
    "bool joined, ScalarType out_dtype) -> Tensor",
    gradient=_turn_back, wrt=("x",), name="rotary",
)(rotate_definition)  # fmt: skip
LINEAR.add(rotate)


@compose(name="rotary")
def rotate_pairs(x: Tensor, turns: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product of ``x`` (..., D), columns 2j and 2j + 1 as a complex number, and ``turns``
    (complex, broadcastable to (..., D / 2))."""
    cos, sin = torch.view_as_real(turns.resolve_conj()).unbind(-1)
    return rotate(x, cos, sin, 1, True, False, True, out_dtype)


@define(
    "rotate_heads(Tensor x, Tensor cos, Tensor sin, Tensor even, Tensor odd, int distance, "
    "bool paired, bool inverse, bool joined, ScalarType out_dtype) -> Tensor",
    name="rotary",
)
def rotate_heads(
    x: Tensor, cos: Tensor, sin: Tensor, even: Tensor, odd: Tensor, *how: Any
) -> Tensor:
    """Apply ``rotate`` to the heads of ``x`` (..., H * D), the rows of a projection's product;
    ``how``: the other arguments of ``rotate``.

    ``cos`` and ``sin`` broadcast against (..., H, D). ``even`` and ``odd``, each (rows, D), are the
    tables in the form that kernels read: y = x * even + s * odd, where s is x with the columns of
    each pair exchanged. Not being read here, they are not computed for rotations that stay unfused.
    """
    assert even.shape == odd.shape, "tables of the same shape"
    heads = x.unflatten(-1, (-1, even.shape[-1]))
    return rotate_definition(heads, cos, sin, *how).flatten(-2)


CROSSING.add(rotate_heads)
