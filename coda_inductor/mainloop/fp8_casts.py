# SPDX-License-Identifier: Apache-2.0
"""``runtime.fp8_casts`` in Triton: each element is read once, in tiles.

Both kernels do nothing but move memory, so what a block holds is as large as leaves four or more on
a multiprocessor (16 KB of 16 bits: enough reads under way to cover their latency), and 128 long in
the direction in which a transposed tile is written: whole lines of 128 bytes of one byte each.
There is nothing to tune, and so nothing to measure at run time.

No value is clamped before it is cast: ``cvt.rn.satfinite``, which Triton makes of a cast to FP8
where there is hardware for it (compute capability 8.9), saturates infinite values too and keeps
NaN. Clamps would be a quarter of the instructions.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from coda_inductor.mainloop.relaunch import Launches, current, key_of

#: Elements of a tile that casts: 64 for each thread.
_TILE = 8192
#: Its columns where it is turned, and at most where it is not.
_TURNED, _STRAIGHT = 64, 1024
#: Rows of a tile whose maxima are taken at a time, and the warps that do: a whole tile in registers
#: leaves one block on a multiprocessor, which does not read while it compares.
_CHUNK, _AMAX_WARPS = 32, 4
#: How a scale, or the factor, lies beside the matrix: constants of the kernels.
_NONE, _ONE, _ROWS, _COLUMNS = range(4)


@triton.jit
def _times(value, pointer, HOW: tl.constexpr, rows, columns, m, k, TURNED: tl.constexpr):
    """``value`` times a scale (or the factor). If it is turned, its columns are rows of ``x``."""
    if HOW == 1:
        value *= tl.load(pointer)
    elif HOW == 2:
        by = tl.load(pointer + rows, rows < m, 0.0)
        value *= by[None, :] if TURNED else by[:, None]
    elif HOW == 3:
        by = tl.load(pointer + columns, columns < k, 0.0)
        value *= by[:, None] if TURNED else by[None, :]
    return value


@triton.jit
def _cast_kernel(
    x, factor, scale, scale_t, q, qt, m, k, stride,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, SCALE_T: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(k, TILE_K)
    rows = (tl.program_id(0) // across) * TILE_M + tl.arange(0, TILE_M)
    columns = (tl.program_id(0) % across) * TILE_K + tl.arange(0, TILE_K)
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    inside = (rows[:, None] < m) & (columns[None, :] < k)
    loaded = tl.load(x + wide_rows[:, None] * stride + columns[None, :], inside, 0.0)
    if SCALE != 0:
        value = _times(loaded.to(tl.float32), factor, FACTOR, rows, columns, m, k, False)
        value = _times(value, scale, SCALE, rows, columns, m, k, False)
        straight = value.to(q.dtype.element_ty)
        tl.store(q + wide_rows[:, None] * k + columns[None, :], straight, inside)
    if SCALE_T != 0:
        # Turned before it is cast: there are instructions for that in 16 bits, not in 8.
        value = tl.trans(loaded).to(tl.float32)
        value = _times(value, factor, FACTOR, rows, columns, m, k, True)
        value = _times(value, scale_t, SCALE_T, rows, columns, m, k, True)
        inside = (columns[:, None] < k) & (rows[None, :] < m)
        turned = value.to(qt.dtype.element_ty)
        tl.store(qt + wide_columns[:, None] * m + rows[None, :], turned, inside)


@triton.jit
def _amax_kernel(
    x, factor, over_rows, over_columns, m, k, stride,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(k, TILE)
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    columns = right * TILE + tl.arange(0, TILE)
    highest = tl.zeros((CHUNK, TILE), tl.int32)
    for start in range(0, TILE, CHUNK):
        rows = down * TILE + start + tl.arange(0, CHUNK)
        inside = (rows[:, None] < m) & (columns[None, :] < k)
        loaded = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], inside, 0.0)
        value = loaded.to(tl.float32)
        value = _times(value, factor, FACTOR, rows, columns, m, k, False)
        # Without their sign, floats are ordered like their bits, and a NaN is above infinity.
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if ROWS:
            most = tl.max(bits, 1).to(tl.float32, bitcast=True)
            tl.store(over_rows + rows.to(tl.int64) * across + right, most, rows < m)
        if COLUMNS:
            highest = tl.maximum(highest, bits)
    if COLUMNS:
        most = tl.max(highest, 0).to(tl.float32, bitcast=True)
        tl.store(over_columns + down.to(tl.int64) * k + columns, most, columns < k)


_CASTS, _MAXIMA = Launches(_cast_kernel), Launches(_amax_kernel)


def cast(
    x: Tensor, factor: Tensor | None, scale: Tensor | None, scale_t: Tensor | None,
    q: Tensor, qt: Tensor,
) -> None:  # fmt: skip
    """Write ``q`` (M, K) and ``qt`` (K, M), both contiguous; see ``runtime.fp8_casts.fp8_cast``.

    Without its scale, a result is left alone.

    Raises:
        ValueError: the shape of a scale, or of the factor, is none of those allowed.
    """
    if x.stride(1) != 1 and x.stride(0) == 1:  # of its transpose, which is what lies in rows
        x, q, qt = x.t(), qt, q
        scale, scale_t, factor = (v if v is None else v.t() for v in (scale_t, scale, factor))
    vectors = (factor, scale, scale_t)
    key = (x.device.index, key_of(x, *vectors, q, qt)) if current(x) else None
    if key is not None and (launch := _CASTS.again(key)) is not None:
        launch(x, *[x if v is None else v for v in vectors], q, qt)
        return
    m, k = x.shape
    lying = x if x.stride(1) == 1 else x.contiguous()
    laid = [v if v is None else v.contiguous() for v in vectors]
    if lying is not x or any(a is not b for a, b in zip(laid, vectors, strict=True)):
        key = None  # copied, which the next one needs as well
    hows = [_how(v, m, k) for v in laid]
    tile_k = _TURNED if scale_t is not None else min(_STRAIGHT, triton.next_power_of_2(k))
    tile_m = _TILE // tile_k
    blocks = triton.cdiv(m, tile_m) * triton.cdiv(k, tile_k)
    args = (lying, *(lying if v is None else v for v in laid), q, qt)
    with _device(x):
        _CASTS.first(key, blocks, args, (m, k, lying.stride(0), *hows, tile_m, tile_k))


def amax(x: Tensor, factor: Tensor | None, rows: Tensor, cols: Tensor, tile: int) -> None:
    """Write what is wanted (is not empty) of ``rows`` (M, tiles) and ``cols`` (tiles, K), both
    contiguous; see ``runtime.fp8_casts.fp8_amax``.

    Raises:
        ValueError: as for :func:`cast`.
    """
    key = (x.device.index, tile, key_of(x, factor, rows, cols)) if current(x) else None
    if key is not None and (launch := _MAXIMA.again(key)) is not None:
        launch(x, x if factor is None else factor, rows, cols)
        return
    lying = x if x.stride(1) == 1 else x.contiguous()
    by = factor if factor is None else factor.contiguous()
    if lying is not x or by is not factor:
        key = None
    m, k = x.shape
    blocks = triton.cdiv(m, tile) * triton.cdiv(k, tile)
    wanted = rows.numel() > 0, cols.numel() > 0
    args = (lying, lying if by is None else by, rows, cols)
    rest = (m, k, lying.stride(0), _how(by, m, k), *wanted, tile, _CHUNK)
    with _device(x):
        _MAXIMA.first(key, blocks, args, rest, num_warps=_AMAX_WARPS)


def _how(vector: Tensor | None, m: int, k: int) -> int:
    if vector is None:
        return _NONE
    known = {(m, 1): _ROWS, (1, k): _COLUMNS, (1, 1): _ONE, (1,): _ONE, (): _ONE}
    shape = tuple(vector.shape)
    if vector.dtype != torch.float32 or shape not in known:
        raise ValueError(
            f"scales of ({m}, {k}) are float32, one a row or column, not {vector.dtype} {shape}"
        )
    return known[shape]


def _device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
