# SPDX-License-Identifier: Apache-2.0
"""``semantic.dropout`` in Triton: each direction reads x and draws its masks once.

Drawing takes longer than reading: Philox is some 40 instructions for eight elements of one mask. So
the gradients of x and of the weights share a kernel.

Forward, a program has one mask: rows of x times one A, over a part of K. Programs of the same rows
follow each other, so that only the first one reads x from memory. Backward, a program has a block
of columns and a part of the rows. It sums the gradient of x over all masks, and holds one gradient
of A for each. Sums over parts are made in order by another kernel,
so that results repeat bit by bit.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coda_inductor.semantic.dropout import ROUNDS, dropped, gradients, scale

#: Programs for each multiprocessor, and elements of a program that sums parts.
_FILL, _SUMMED = 4, 1024
#: The most columns of products that four warps hold.
_NARROW = 64
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def _keep(seed, rows, at, number, DROPPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The part of a mask in ``rows`` and the columns from ``at`` on."""
    zeros = tl.zeros((ROWS, COLUMNS // 8), tl.int32)
    eights = zeros + at // 8 + tl.arange(0, COLUMNS // 8)[None, :]
    a, b, c, d = tl.philox(seed, eights, zeros + rows[:, None], zeros + number, zeros, _ROUNDS)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLUMNS // 2))
    # The lower half of each word comes first; the lower half of a number does not change the order.
    halves = tl.reshape(tl.join(words << 16, words), (ROWS, COLUMNS))
    return halves >= DROPPED * 65536


@triton.jit(do_not_specialize=["first", "count"])
def _dropout_forward(
    x, weight, seed, out, m, k, stride, first, count, rank, span,
    DROPPED: tl.constexpr, SCALE: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0) % count
    rows = tl.program_id(0) // count * ROWS + tl.arange(0, ROWS)
    start, key, ranks = tl.program_id(1) * span, tl.load(seed), tl.arange(0, RANK)
    wide = rows.to(tl.int64)
    total = tl.zeros((ROWS, RANK), tl.float32)
    for at in range(start, tl.minimum(start + span, k), COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < m) & (columns[None, :] < k)
        own = tl.load(x + wide[:, None] * stride + columns[None, :], inside, 0.0)
        inside = (columns[:, None] < k) & (ranks[None, :] < rank)
        by = tl.load(weight + (mine * rank + ranks)[None, :] * k + columns[:, None], inside, 0.0)
        keep = _keep(key, rows, at, first + mine, DROPPED, ROWS, COLUMNS)
        kept = tl.where(keep, own, 0.0).to(by.dtype)
        total = tl.dot(kept, by, total, input_precision=PRECISION)
    place = (tl.program_id(1).to(tl.int64) * m + wide)[:, None] * (count * rank) + mine * rank
    inside = (rows[:, None] < m) & (ranks[None, :] < rank)
    tl.store(out + place + ranks[None, :], (total * SCALE).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["first"])
def _dropout_backward(
    x, weight, seed, dt, dx, dweight, m, k, stride, first, COUNT: tl.constexpr, rank, span,
    DROPPED: tl.constexpr, SCALE: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    DX: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    at, start, key = tl.program_id(0) * COLUMNS, tl.program_id(1) * span, tl.load(seed)
    columns, ranks = at + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    of_weight = (ranks[:, None] < rank) & (columns[None, :] < k)
    sums = ()  # type: tuple[Any, ...]
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros((RANK, COLUMNS), tl.float32),)
    for row in range(start, tl.minimum(start + span, m), ROWS):
        rows = row + tl.arange(0, ROWS)
        inside, wide = (rows[:, None] < m) & (columns[None, :] < k), rows.to(tl.int64)[:, None]
        own = tl.load(x + wide * stride + columns[None, :], inside, 0.0)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        news = ()  # type: tuple[Any, ...]
        for i in tl.static_range(COUNT):
            place = wide * (COUNT * rank) + i * rank + ranks[None, :]
            d = tl.load(dt + place, (rows[:, None] < m) & (ranks[None, :] < rank), 0.0)
            keep = _keep(key, rows, at, first + i, DROPPED, ROWS, COLUMNS)
            if DX:
                by = tl.load(weight + (i * rank + ranks)[:, None] * k + columns, of_weight, 0.0)
                total += tl.where(keep, tl.dot(d, by, input_precision=PRECISION), 0.0)
            if DW:
                kept = tl.where(keep, own, 0.0).to(d.dtype)
                news += (tl.dot(tl.trans(d), kept, sums[i], input_precision=PRECISION),)
        if DX:
            tl.store(dx + wide * k + columns, (total * SCALE).to(dx.dtype.element_ty), inside)
        if DW:
            sums = news
    if DW:
        for i in tl.static_range(COUNT):
            place = ((tl.program_id(1) * COUNT + i) * rank + ranks).to(tl.int64)[:, None] * k
            found = (sums[i] * SCALE).to(dweight.dtype.element_ty)
            tl.store(dweight + place + columns, found, of_weight)


@triton.jit
def _dropout_sum(parts, out, n, count, BLOCK: tl.constexpr):
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
    if out.numel():
        x, how = _launch(x, weight, count, p, *tiles(count, weight.shape[0] // count)[0])
        blocks = triton.cdiv(x.shape[0], how["ROWS"]) * count
        span, parts = _parts(x.shape[1], how["COLUMNS"], blocks, out)
        with _on(x):
            _dropout_forward[(blocks, parts.shape[0])](
                x, weight.contiguous(), seed, parts, *x.shape, x.stride(0), first, count,
                weight.shape[0] // count, span, **how,
            )  # fmt: skip
            _sum_parts(parts, out)
    return out


def dropout_linear_backward(
    dt: Tensor, x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``semantic.dropout.dropout_linear_backward``, not in float64."""
    dx, dweight = gradients(dt, x, weight, seed, first, count, p, needs)
    if not dt.numel():
        return dx.zero_(), dweight.zero_()
    x, how = _launch(x, weight, count, p, *tiles(count, weight.shape[0] // count)[1])
    blocks = triton.cdiv(x.shape[1], how["COLUMNS"])
    span, parts = _parts(x.shape[0], how["ROWS"], blocks, dweight)
    with _on(x):
        _dropout_backward[(blocks, parts.shape[0])](
            x, weight.contiguous(), seed, dt.contiguous(), dx, parts, *x.shape, x.stride(0), first,
            count, weight.shape[0] // count, span, DX=needs[0], DW=needs[1], **how,
        )  # fmt: skip
        if needs[1]:
            _sum_parts(parts, dweight)
    return dx, dweight


def tiles(count: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """Rows, columns and warps of a tile forward, and backward: as many as fit into registers."""
    narrow = count * max(16, rank) <= _NARROW
    return (64, 64, 8 if rank > 128 else 4), (32, 64, 4) if narrow else (64, 32, 8)


def _launch(
    x: Tensor, weight: Tensor, count: int, p: float, rows: int, columns: int, warps: int
) -> tuple[Tensor, dict[str, Any]]:
    """``x`` (M, K) with contiguous rows, and the constants of a kernel."""
    x = x.reshape(-1, x.shape[-1])
    rank = max(16, triton.next_power_of_2(weight.shape[0] // count))
    fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return x if x.stride(1) == 1 else x.contiguous(), {
        "DROPPED": dropped(p), "SCALE": scale(p), "RANK": rank, "ROWS": rows, "COLUMNS": columns,
        "PRECISION": "tf32" if fast else "ieee", "num_warps": warps,
    }  # fmt: skip


def _parts(size: int, tile: int, blocks: int, out: Tensor) -> tuple[int, Tensor]:
    """For a sum over ``size`` that is cut so that all multiprocessors work: how long a part is, and
    the sums of the parts; ``out`` itself if there is one."""
    processors = 1
    if out.is_cuda:
        processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    parts = max(1, min(triton.cdiv(_FILL * processors, blocks), size // (4 * tile)))
    span = triton.cdiv(triton.cdiv(size, parts), tile) * tile
    parts = triton.cdiv(size, span)
    return span, out[None] if parts == 1 else out.new_empty(parts, *out.shape, dtype=torch.float32)


def _sum_parts(parts: Tensor, out: Tensor) -> None:
    n = out.numel()
    if parts.shape[0] > 1:
        _dropout_sum[(triton.cdiv(n, _SUMMED),)](parts, out, n, parts.shape[0], BLOCK=_SUMMED)


def _on(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
