# SPDX-License-Identifier: Apache-2.0
"""``semantic.dropout`` in Triton: each direction reads x and draws its masks once.

Drawing masks takes longer than reading x: Philox is some 40 instructions for eight elements of one
mask. So the gradients of x and of the weights share a kernel. In the forward pass, a program has
one mask: rows of x times one A, over a part of K. In the backward pass, it has a block of columns
and a part of the rows, sums the gradient of x over all masks, and holds one gradient of A for each.
Another kernel adds the parts in order, so that results repeat bit by bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coda_inductor.semantic.dropout import ROUNDS, dropped, gradients, scale

#: Programs for each multiprocessor, and elements of a program that sums parts.
_FILL, _SUMMED = 8, 1024
#: The most columns of products that four warps hold, in large tiles and in others.
_SMALL, _WIDE = 32, 128
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def _keep(seed, rows, at, number, DROPPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
    mask = tl.program_id(0) % count
    rows = tl.program_id(0) // count * ROWS + tl.arange(0, ROWS)
    start, key, ranks = tl.program_id(1) * span, tl.load(seed), tl.arange(0, RANK)
    wide = rows.to(tl.int64)
    total = tl.zeros((ROWS, RANK), tl.float32)
    for at in range(start, tl.minimum(start + span, k), COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < m) & (columns[None, :] < k)
        values = tl.load(x + wide[:, None] * stride + columns[None, :], inside, 0.0)
        inside = (columns[:, None] < k) & (ranks[None, :] < rank)
        by = tl.load(weight + (mask * rank + ranks)[None, :] * k + columns[:, None], inside, 0.0)
        keep = _keep(key, rows, at, first + mask, DROPPED, ROWS, COLUMNS)
        masked = tl.where(keep, values, 0.0).to(by.dtype)
        total = tl.dot(masked, by, total, input_precision=PRECISION)
    offset = (tl.program_id(1).to(tl.int64) * m + wide)[:, None] * (count * rank) + mask * rank
    inside = (rows[:, None] < m) & (ranks[None, :] < rank)
    tl.store(out + offset + ranks[None, :], (total * SCALE).to(out.dtype.element_ty), inside)


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
    sums, bys = (), ()  # type: tuple[Any, ...], tuple[Any, ...]
    for i in tl.static_range(COUNT):
        sums += (tl.zeros((RANK, COLUMNS), tl.float32),)
        bys += (tl.load(weight + (i * rank + ranks)[:, None] * k + columns, of_weight, 0.0),)
    for row in range(start, tl.minimum(start + span, m), ROWS):
        rows = row + tl.arange(0, ROWS)
        inside, wide = (rows[:, None] < m) & (columns[None, :] < k), rows.to(tl.int64)[:, None]
        values = tl.load(x + wide * stride + columns[None, :], inside, 0.0)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        news = ()  # type: tuple[Any, ...]
        for i in tl.static_range(COUNT):
            offset = wide * (COUNT * rank) + i * rank + ranks[None, :]
            d = tl.load(dt + offset, (rows[:, None] < m) & (ranks[None, :] < rank), 0.0)
            keep = _keep(key, rows, at, first + i, DROPPED, ROWS, COLUMNS)
            if DX:
                total += tl.where(keep, tl.dot(d, bys[i], input_precision=PRECISION), 0.0)
            if DW:
                masked = tl.where(keep, values, 0.0).to(d.dtype)
                news += (tl.dot(tl.trans(d), masked, sums[i], input_precision=PRECISION),)
        if DX:
            tl.store(dx + wide * k + columns, (total * SCALE).to(dx.dtype.element_ty), inside)
        if DW:
            sums = news
    if DW:
        for i in tl.static_range(COUNT):
            offset = ((tl.program_id(1) * COUNT + i) * rank + ranks).to(tl.int64)[:, None] * k
            result = (sums[i] * SCALE).to(dweight.dtype.element_ty)
            tl.store(dweight + offset + columns, result, of_weight)


@triton.jit
def _dropout_sum(parts, out, n, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(count):
        total += tl.load(parts + offset, offset < n, 0.0)
        parts += n
    tl.store(out + offset, total.to(out.dtype.element_ty), offset < n)


def dropout_linear(
    x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float
) -> Tensor:
    """As ``semantic.dropout.dropout_linear``, except for float64."""
    out = weight.new_empty(*x.shape[:-1], weight.shape[0])
    if out.numel():
        _launch(_dropout_forward, x, weight, seed, first, count, p, (), out)
    return out


def dropout_linear_backward(
    dt: Tensor, x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``semantic.dropout.dropout_linear_backward``, except for float64."""
    dx, dweight = gradients(dt, x, weight, seed, first, count, p, needs)
    if not dt.numel():
        return dx.zero_(), dweight.zero_()
    flags, more = {"DX": needs[0], "DW": needs[1]}, (dt.contiguous(), dx)
    _launch(_dropout_backward, x, weight, seed, first, count, p, more, dweight, **flags)
    return dx, dweight


def tiles(count: int, rank: int, size: int) -> tuple[tuple[int, int, int], ...]:
    """(rows, columns, warps) of a tile forward and backward, for weights of ``size`` bytes: of ten
    tiles each the quickest for one to three masks of rank 16 (H200, 2026-11-30). Larger sums and
    IEEE float32 need registers: there, in 16 bits, within 13 % of the best of ten up to rank 64."""
    wide, small = count * max(16, rank), size == 2 and rank <= _SMALL
    backward = (32, 128, 4) if small and wide <= _SMALL else (64, 32, 4 if wide <= _WIDE else 8)
    return (64, 128 if small else 64, 8 if rank > 128 else 4), backward


def _launch(
    kernel: Any, x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float,
    more: tuple[Tensor, ...], out: Tensor, **flags: bool,
) -> None:  # fmt: skip
    """Launch ``kernel``, which writes ``out``. Its sum is split to occupy the whole GPU."""
    x, rank = x.reshape(-1, x.shape[-1]), weight.shape[0] // count
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), forward, processors = x.shape, kernel is _dropout_forward, 1
    rows, columns, warps = tiles(count, rank, weight.itemsize)[not forward]
    blocks = triton.cdiv(m, rows) * count if forward else triton.cdiv(k, columns)
    size, tile = (k, columns) if forward else (m, rows)
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    parts = max(1, min(triton.cdiv(_FILL * processors, blocks), size // (4 * tile)))
    span = triton.cdiv(triton.cdiv(size, parts), tile) * tile
    parts, n = triton.cdiv(size, span), out.numel()
    sums = out if parts == 1 else out.new_empty(parts, n, dtype=torch.float32)
    fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    with torch.cuda.device(x.get_device()):
        kernel[(blocks, parts)](
            x, weight.contiguous(), seed, *more, sums, m, k, x.stride(0), first, count, rank, span,
            DROPPED=dropped(p), SCALE=scale(p), RANK=max(16, triton.next_power_of_2(rank)),
            ROWS=rows, COLUMNS=columns, PRECISION="tf32" if fast else "ieee", **flags,
            num_warps=warps,
        )  # fmt: skip
        if parts > 1 and n:
            _dropout_sum[(triton.cdiv(n, _SUMMED),)](sums, out, n, parts, BLOCK=_SUMMED)
