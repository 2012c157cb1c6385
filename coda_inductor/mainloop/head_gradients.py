# SPDX-License-Identifier: Apache-2.0
"""``runtime.head_gradients`` in Triton: every element is read once, and so is every table.

A program holds some tokens, whose cosines and sines stay in registers from head to head. Both
columns of a pair are loaded by the same thread, so that a rotation is arithmetic. (Inductor's
kernel of the same loads each element at two places, computes which, and takes twice the time of the
traffic: docs/gotchas.md, Rotary.)
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from coda_inductor.mainloop.relaunch import Launches, current, key_of

#: Elements of a head's tile: 16 bytes of each half of it a thread.
_TILE = 2048
#: Heads of a program, at most: tables are read once for so many.
_HEADS = 8
_WARPS = 4


@triton.jit
def _head_gradient_kernel(
    dy, cos, sin, z, weight, scale, dz, scaled, partials,
    tokens, length, heads, eps,
    dy_b, dy_h, dy_t, z_b, z_h, z_t, cos_b, cos_t, sin_b, sin_t,
    HALF: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, PAIRED: tl.constexpr, INVERSE: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, PARTIALS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    b, t = (token // length).to(tl.int64), token % length
    pair = tl.arange(0, COLUMNS)
    there = (token < tokens)[:, None] & (pair < HALF)[None, :]
    if NEIGHBOURS:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    angle, other = first, second
    if PAIRED:
        angle, other = pair, pair
    c, s = (b * cos_b + t * cos_t)[:, None], (b * sin_b + t * sin_t)[:, None]
    ca = tl.load(cos + c + angle[None, :], there, 0.0).to(tl.float32)
    cb = tl.load(cos + c + other[None, :], there, 0.0).to(tl.float32)
    sa = tl.load(sin + s + angle[None, :], there, 0.0).to(tl.float32)
    sb = tl.load(sin + s + other[None, :], there, 0.0).to(tl.float32)
    if INVERSE:
        from_b, from_a = sb, -sa
    else:
        from_b, from_a = -sa, sb
    wa = tl.full((COLUMNS,), 1.0, tl.float32)
    wb = wa
    if WEIGHT:
        wa = tl.load(weight + first, pair < HALF, 0.0).to(tl.float32)
        wb = tl.load(weight + second, pair < HALF, 0.0).to(tl.float32)
    if SCALED:
        by = tl.load(scale + token, token < tokens, 0.0).to(tl.float32)[:, None]
    sum_a = tl.zeros((TOKENS, COLUMNS), tl.float32)
    sum_b = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for i in range(HEADS):
        head = tl.program_id(1) * HEADS + i
        here = (token < tokens) & (token * 0 + head < heads)
        inside = here[:, None] & (pair < HALF)[None, :]
        row = (b * dy_b + head * dy_h + t.to(tl.int64) * dy_t)[:, None]
        a = tl.load(dy + row + first[None, :], inside, 0.0).to(tl.float32)
        e = tl.load(dy + row + second[None, :], inside, 0.0).to(tl.float32)
        da, db = a * ca + e * from_b, e * cb + a * from_a
        if NORM:
            row = (b * z_b + head * z_h + t.to(tl.int64) * z_t)[:, None]
            xa = tl.load(z + row + first[None, :], inside, 0.0).to(tl.float32)
            xb = tl.load(z + row + second[None, :], inside, 0.0).to(tl.float32)
            squares = tl.sum(xa * xa, 1) + tl.sum(xb * xb, 1)
            # Rows that are not there must not make NaNs of eps = 0.
            squares = tl.where(here, squares, 1.0)
            rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            na, nb = xa * rstd, xb * rstd
            if PARTIALS:
                sum_a += da * na
                sum_b += db * nb
            da, db = da * wa[None, :], db * wb[None, :]
            mean = ((tl.sum(da * na, 1) + tl.sum(db * nb, 1)) / (2 * HALF))[:, None]
            da, db = rstd * (da - na * mean), rstd * (db - nb * mean)
        out = (token.to(tl.int64) * heads + head)[:, None] * (2 * HALF)
        tl.store(dz + out + first[None, :], da.to(dz.dtype.element_ty), inside)
        tl.store(dz + out + second[None, :], db.to(dz.dtype.element_ty), inside)
        if SCALED:
            tl.store(scaled + out + first[None, :], (da * by).to(dz.dtype.element_ty), inside)
            tl.store(scaled + out + second[None, :], (db * by).to(dz.dtype.element_ty), inside)
    if PARTIALS:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partials + program * (2 * HALF) + first, tl.sum(sum_a, 0), pair < HALF)
        tl.store(partials + program * (2 * HALF) + second, tl.sum(sum_b, 0), pair < HALF)


_LAUNCHES = Launches(_head_gradient_kernel)


def programs(tokens: int, heads: int, size: int) -> tuple[int, int, int, int]:
    """Blocks of tokens, groups of heads, tokens of a block, heads of a group."""
    columns = triton.next_power_of_2(size // 2)
    block = max(1, _TILE // (2 * columns))
    group = min(_HEADS, heads)
    return triton.cdiv(tokens, block), triton.cdiv(heads, group), block, group


def head_gradient(
    dy: Tensor, cos: Tensor, sin: Tensor, z: Tensor | None, weight: Tensor | None,
    scale: Tensor | None, eps: float, *, neighbours: bool, paired: bool, inverse: bool,
    dz: Tensor, scaled: Tensor | None, partials: Tensor | None,
) -> None:  # fmt: skip
    """Write ``dz``, and what else is not None; see ``runtime.head_gradients.head_gradient``.
    ``partials`` (programs, D) float32 are summed to the weight's gradient. ``dy``, ``z`` and the
    tables have contiguous columns; ``dz``, ``scaled``, ``scale`` and ``weight`` are contiguous."""
    x = dy if z is None else z
    args = (
        dy, cos, sin, x, dy if weight is None else weight, dy if scale is None else scale,
        dz, dz if scaled is None else scaled, dz if partials is None else partials,
    )  # fmt: skip
    key = None
    if current(dy):
        given = key_of(dy, cos, sin, z, weight, scale, dz, scaled, partials)
        key = (dy.device.index, eps, neighbours, paired, inverse, given)
        if (launch := _LAUNCHES.again(key)) is not None:
            launch(*args)
            return
    b, heads, length, size = dy.shape
    blocks, groups, block, group = programs(b * length, heads, size)
    steps = [_step(table, dim) for table in (cos, sin) for dim in (0, 2)]
    sizes = (b * length, length, heads, eps, *dy.stride()[:3], *x.stride()[:3], *steps)
    half = size // 2
    wanted = (z is not None, weight is not None, partials is not None, scaled is not None)
    constants = (half, triton.next_power_of_2(half), block, group, neighbours, paired, inverse)
    with torch.cuda.device(dy.device) if dy.is_cuda else contextlib.nullcontext():
        _LAUNCHES.first(
            key, (blocks, groups), args, (*sizes, *constants, *wanted), num_warps=_WARPS
        )


def _step(table: Tensor, dim: int) -> int:
    return 0 if table.shape[dim] == 1 else table.stride(dim)
