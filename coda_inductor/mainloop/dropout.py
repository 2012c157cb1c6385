# SPDX-License-Identifier: Apache-2.0
"""``semantic.dropout`` in Triton: each direction reads x and draws its masks once.

Drawing takes longer than reading: ten rounds of Philox are some 60 instructions for eight elements
of one mask. So one call of it serves eight elements, and the gradients of x and of the weights
share a kernel.

Forward, a program has one mask: rows of x times one A, over a part of K. Programs of the same rows
follow each other, so that only the first one reads x from memory. Backward, a program has a block
of columns and a part of the rows. It sums the gradient of x over all masks, and holds one gradient
of A each, which is why there are at most four. Sums over parts are made in order by another kernel,
so that results repeat bit by bit.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coda_inductor.semantic.dropout import dropped, gradients, scale

#: Rows and columns of a tile, of at most so many columns of results for four warps.
_TILE, _NARROW = 64, 64
#: Programs for each multiprocessor, and elements of a program that sums parts.
_FILL, _SUMMED = 4, 1024
_MOST = 4


@triton.jit
def _keep(seed, rows, at, number, DROPPED: tl.constexpr, TILE: tl.constexpr):
    """The part of a mask in ``rows`` and the columns from ``at`` on."""
    row = rows[:, None] + tl.zeros((1, TILE // 8), tl.int32)
    eight = at // 8 + tl.arange(0, TILE // 8)[None, :] + tl.zeros((TILE, 1), tl.int32)
    zeros = tl.zeros((TILE, TILE // 8), tl.int32)
    a, b, c, d = tl.philox(seed, eight, row, zeros + number, zeros)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE, TILE // 2))
    # The lower half of each word comes first; the lower half of a number does not change the order.
    halves = tl.reshape(tl.join(words << 16, words), (TILE, TILE))
    return halves >= DROPPED * 65536


@triton.jit
def _forward(
    x, weight, seed, out, m, k, stride, first, rank, span,
    DROPPED: tl.constexpr, SCALE: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0) % COUNT
    rows = tl.program_id(0) // COUNT * TILE + tl.arange(0, TILE)
    start, key, ranks = tl.program_id(1) * span, tl.load(seed), tl.arange(0, RANK)
    wide = rows.to(tl.int64)
    total = tl.zeros((TILE, RANK), tl.float32)
    for at in range(start, tl.minimum(start + span, k), TILE):
        columns = at + tl.arange(0, TILE)
        inside = (rows[:, None] < m) & (columns[None, :] < k)
        own = tl.load(x + wide[:, None] * stride + columns[None, :], inside, 0.0)
        inside = (columns[:, None] < k) & (ranks[None, :] < rank)
        by = tl.load(weight + (mine * rank + ranks)[None, :] * k + columns[:, None], inside, 0.0)
        keep = _keep(key, rows, at, first + mine, DROPPED, TILE)
        kept = tl.where(keep, own, 0.0).to(by.dtype)
        total = tl.dot(kept, by, total, input_precision=PRECISION)
    place = (tl.program_id(1).to(tl.int64) * m + wide)[:, None] * (COUNT * rank) + mine * rank
    inside = (rows[:, None] < m) & (ranks[None, :] < rank)
    tl.store(out + place + ranks[None, :], (total * SCALE).to(out.dtype.element_ty), inside)


@triton.jit
def _of_one(
    mine, total, gradient, own, dt, weight, key, rows, at, m, k, first, rank,
    DROPPED: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    DX: tl.constexpr, DW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one mask adds to the gradients of x and of its weight."""
    columns, ranks = at + tl.arange(0, TILE), tl.arange(0, RANK)
    inside = (rows[:, None] < m) & (ranks[None, :] < rank)
    place = rows.to(tl.int64)[:, None] * (COUNT * rank) + mine * rank + ranks[None, :]
    d = tl.load(dt + place, inside, 0.0)
    keep = _keep(key, rows, at, first + mine, DROPPED, TILE)
    if DX:
        inside = (ranks[:, None] < rank) & (columns[None, :] < k)
        by = tl.load(weight + (mine * rank + ranks)[:, None] * k + columns[None, :], inside, 0.0)
        total += tl.where(keep, tl.dot(d, by, input_precision=PRECISION), 0.0)
    if DW:
        kept = tl.where(keep, own, 0.0).to(d.dtype)
        gradient = tl.dot(tl.trans(d), kept, gradient, input_precision=PRECISION)
    return total, gradient


@triton.jit
def _store_one(
    mine, gradient, dweight, at, k, rank, SCALE: tl.constexpr, COUNT: tl.constexpr,
    RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    columns, ranks = at + tl.arange(0, TILE), tl.arange(0, RANK)
    inside = (ranks[:, None] < rank) & (columns[None, :] < k)
    row = (tl.program_id(1) * COUNT + mine) * rank + ranks
    place = row.to(tl.int64)[:, None] * k + columns[None, :]
    tl.store(dweight + place, (gradient * SCALE).to(dweight.dtype.element_ty), inside)


@triton.jit
def _backward(
    x, weight, seed, dt, dx, dweight, m, k, stride, first, rank, span,
    DROPPED: tl.constexpr, SCALE: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    at, start, key = tl.program_id(0) * TILE, tl.program_id(1) * span, tl.load(seed)
    columns = at + tl.arange(0, TILE)
    g0 = tl.zeros((RANK, TILE), tl.float32)
    g1, g2, g3 = g0, g0, g0
    for row in range(start, tl.minimum(start + span, m), TILE):
        rows = row + tl.arange(0, TILE)
        inside = (rows[:, None] < m) & (columns[None, :] < k)
        wide = rows.to(tl.int64)[:, None]
        own = tl.load(x + wide * stride + columns[None, :], inside, 0.0)
        total = tl.zeros((TILE, TILE), tl.float32)
        total, g0 = _of_one(
            0, total, g0, own, dt, weight, key, rows, at, m, k, first, rank,
            DROPPED, COUNT, RANK, TILE, DX, DW, PRECISION,
        )  # fmt: skip
        if COUNT > 1:
            total, g1 = _of_one(
                1, total, g1, own, dt, weight, key, rows, at, m, k, first, rank,
                DROPPED, COUNT, RANK, TILE, DX, DW, PRECISION,
            )  # fmt: skip
        if COUNT > 2:
            total, g2 = _of_one(
                2, total, g2, own, dt, weight, key, rows, at, m, k, first, rank,
                DROPPED, COUNT, RANK, TILE, DX, DW, PRECISION,
            )  # fmt: skip
        if COUNT > 3:
            total, g3 = _of_one(
                3, total, g3, own, dt, weight, key, rows, at, m, k, first, rank,
                DROPPED, COUNT, RANK, TILE, DX, DW, PRECISION,
            )  # fmt: skip
        if DX:
            tl.store(dx + wide * k + columns, (total * SCALE).to(dx.dtype.element_ty), inside)
    if DW:
        _store_one(0, g0, dweight, at, k, rank, SCALE, COUNT, RANK, TILE)
        if COUNT > 1:
            _store_one(1, g1, dweight, at, k, rank, SCALE, COUNT, RANK, TILE)
        if COUNT > 2:
            _store_one(2, g2, dweight, at, k, rank, SCALE, COUNT, RANK, TILE)
        if COUNT > 3:
            _store_one(3, g3, dweight, at, k, rank, SCALE, COUNT, RANK, TILE)


@triton.jit
def _sum(parts, out, n, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(count):
        total += tl.load(parts + place, place < n, 0.0)
        parts += n
    tl.store(out + place, total.to(out.dtype.element_ty), place < n)


def dropout_linear(
    x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float
) -> Tensor:
    """As ``semantic.dropout.dropout_linear``, not in float64."""
    out = weight.new_empty(*x.shape[:-1], weight.shape[0])
    rows, sizes, how = _launch(x, weight, count, p)
    (m, k), blocks = rows.shape, triton.cdiv(rows.shape[0], _TILE) * count
    span, parts = _parts(k, blocks, x.device)
    partial = out if parts == 1 else out.new_empty(parts, out.numel(), dtype=torch.float32)
    if out.numel():
        with _on(x):
            _forward[(blocks, parts)](
                rows, weight.contiguous(), seed, partial, m, k, rows.stride(0), first,
                weight.shape[0] // count, span, **sizes, **how,
            )  # fmt: skip
            _sum_parts(partial, out)
    return out


def dropout_linear_backward(
    dt: Tensor, x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``semantic.dropout.dropout_linear_backward``, not in float64; ``count`` is at most 4."""
    if count > _MOST:
        raise ValueError(f"{count} masks are more than {_MOST}")
    dx, dweight = gradients(dt, x, weight, seed, first, count, p, needs)
    dx = dx.contiguous()
    if not dt.numel():
        return dx.zero_(), dweight.zero_()
    rows, sizes, how = _launch(x, weight, count, p)
    (m, k), blocks = rows.shape, triton.cdiv(rows.shape[1], _TILE)
    span, parts = _parts(m, blocks, x.device)
    partial = dweight
    if parts > 1 and needs[1]:
        partial = dweight.new_empty(parts, dweight.numel(), dtype=torch.float32)
    with _on(x):
        _backward[(blocks, parts)](
            rows, weight.contiguous(), seed, dt.contiguous(), dx, partial, m, k, rows.stride(0),
            first, weight.shape[0] // count, span, **sizes, DX=needs[0], DW=needs[1], **how,
        )  # fmt: skip
        _sum_parts(partial, dweight)
    return dx, dweight


def _launch(
    x: Tensor, weight: Tensor, count: int, p: float
) -> tuple[Tensor, dict[str, Any], dict[str, int]]:
    """``x`` (M, K) with contiguous rows, and constants and options of a kernel."""
    rows = x.reshape(-1, x.shape[-1])
    rank = max(16, triton.next_power_of_2(weight.shape[0] // count))
    exact = torch.get_float32_matmul_precision() == "highest"
    constants = {
        "DROPPED": dropped(p), "SCALE": scale(p), "COUNT": count, "RANK": rank, "TILE": _TILE,
        "PRECISION": "ieee" if exact else "tf32",
    }  # fmt: skip
    how = {"num_warps": 4 if count * rank <= _NARROW else 8}
    return rows if rows.stride(1) == 1 else rows.contiguous(), constants, how


def _parts(size: int, blocks: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts a sum over ``size`` is cut, so that all multiprocessors work, and how
    long each is."""
    cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
    parts = max(1, min(triton.cdiv(_FILL * processors, max(1, blocks)), size // (4 * _TILE)))
    span = triton.cdiv(triton.cdiv(size, parts), _TILE) * _TILE
    return span, triton.cdiv(size, span)


def _sum_parts(parts: Tensor, out: Tensor) -> None:
    if parts is not out:
        n = out.numel()
        _sum[(triton.cdiv(n, _SUMMED),)](parts, out, n, parts.shape[0], BLOCK=_SUMMED)


def _on(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
