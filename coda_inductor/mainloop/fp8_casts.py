# SPDX-License-Identifier: Apache-2.0
"""``semantic.fp8_casts`` in Triton: each element is read once, in tiles.

The kernels only move memory, so a tile is as large as possible with four or more blocks on a
multiprocessor (16 KB of 16 bits each), and has 128 elements in the direction in which a transposed
tile is written: a whole line of 128 bytes. There is nothing to tune.

Values are not clamped before the cast, which would be a quarter of the instructions: Triton
compiles a cast to FP8 to ``cvt.rn.satfinite`` if the hardware has it (compute capability 8.9),
which saturates infinite values too and keeps NaN.

Triton's own launcher takes the host longer than the rest of a call, and a training step in FP8
makes some forty calls per layer. Here the properties that it checks (dtypes, sizes, strides,
addresses that are multiples of 16 bytes) are a key, by which a later launch finds its kernel.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coda_inductor.arch import arch_of
from coda_inductor.program.dtypes import HALF
from coda_inductor.semantic.fp8_casts import TILE, amax_results, cast_results

#: Elements of a tile that casts: 64 for each thread.
_TILE = 8192
#: Its columns if it is transposed, and the most columns if it is not.
_TURNED, _STRAIGHT = 64, 1024
#: Warps for a tile's maxima, by whether columns are among them. On an H200 eight warps take 1.3x
#: as long for columns, which they exchange through shared memory (gotchas.md).
_WARPS = {True: 2, False: 8}
#: How a scale, or the factor, broadcasts against the matrix: constants of the kernels.
_NONE, _ONE, _ROWS, _COLUMNS = range(4)
#: The most launches that are remembered, because sizes may change all the time.
_MOST = 1024
#: A launch's key -> a function that launches the kernel for other tensors.
_launchers: dict[Hashable, Callable[..., Any]] = {}


@triton.jit
def _beside(pointer, HOW: tl.constexpr, rows, columns, m, k, TURNED: tl.constexpr):
    """Scales (or the factor) in a form that broadcasts against a tile. If the tile is transposed,
    its columns are rows of ``x``."""
    if HOW == 1:
        by = tl.load(pointer)
    elif HOW == 2:
        by = tl.load(pointer + rows, rows < m, 1.0)
        by = by[None, :] if TURNED else by[:, None]
    else:
        by = tl.load(pointer + columns, columns < k, 1.0)
        by = by[:, None] if TURNED else by[None, :]
    return by


@triton.jit
def _times(value, pointer, HOW: tl.constexpr, rows, columns, m, k, TURNED: tl.constexpr):
    """``value`` times a scale (or the factor, or the weight)."""
    if HOW != 0:
        value *= _beside(pointer, HOW, rows, columns, m, k, TURNED).to(tl.float32)
    return value


@triton.jit
def _over(value, pointer, HOW: tl.constexpr, rows, columns, m, k, TURNED: tl.constexpr):
    """``value`` divided by a scale, rounded as in torch: by the reciprocal, corrected by the
    remainder (Markstein, "Computation of elementary functions on the IBM RISC System/6000
    processor", 1990). The division instruction costs 5x as much, and is used only for scales near
    the limits of float32."""
    by = _beside(pointer, HOW, rows, columns, m, k, TURNED)
    by = by + tl.zeros((1, 1), tl.float32) if HOW == 1 else by
    size = tl.abs(by)
    if tl.min(((size > 1e-30) & (size < 1e30)).to(tl.int32)) == 1:
        reciprocal = tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by)
        inverse = tl.broadcast_to(reciprocal, value.shape)
        guess = value * inverse
        rest = tl.fma(guess, tl.broadcast_to(-by, value.shape), value)
        better = tl.fma(rest, inverse, guess)
        value = tl.where(tl.abs(guess) < 1e30, better, guess)
    else:
        value = tl.div_rn(value, tl.broadcast_to(by, value.shape))
    return value


@triton.jit
def _cast_kernel(
    x, factor, weight, scale, scale_t, q, qt, m, k, stride,
    FACTOR: tl.constexpr, WEIGHT: tl.constexpr, SCALE: tl.constexpr, SCALE_T: tl.constexpr,
    DIVIDE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(k, TILE_K)
    rows = (tl.program_id(0) // across) * TILE_M + tl.arange(0, TILE_M)
    columns = (tl.program_id(0) % across) * TILE_K + tl.arange(0, TILE_K)
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    inside = (rows[:, None] < m) & (columns[None, :] < k)
    loaded = tl.load(x + wide_rows[:, None] * stride + columns[None, :], inside, 0.0)
    if SCALE != 0:
        value = _times(loaded.to(tl.float32), factor, FACTOR, rows, columns, m, k, False)
        value = _times(value, weight, WEIGHT, rows, columns, m, k, False)
        if DIVIDE:
            value = _over(value, scale, SCALE, rows, columns, m, k, False)
        else:
            value = _times(value, scale, SCALE, rows, columns, m, k, False)
        straight = value.to(q.dtype.element_ty)
        tl.store(q + wide_rows[:, None] * k + columns[None, :], straight, inside)
    if SCALE_T != 0:
        # Transposed before the cast: there are instructions for that in 16 bits, not in 8.
        value = tl.trans(loaded).to(tl.float32)
        value = _times(value, factor, FACTOR, rows, columns, m, k, True)
        value = _times(value, weight, WEIGHT, rows, columns, m, k, True)
        if DIVIDE:
            value = _over(value, scale_t, SCALE_T, rows, columns, m, k, True)
        else:
            value = _times(value, scale_t, SCALE_T, rows, columns, m, k, True)
        inside = (columns[:, None] < k) & (rows[None, :] < m)
        transposed = value.to(qt.dtype.element_ty)
        tl.store(qt + wide_columns[:, None] * m + rows[None, :], transposed, inside)


@triton.jit
def _amax_kernel(
    x, factor, over_rows, over_columns, m, k, stride,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(k, TILE)
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    rows, columns = down * TILE + tl.arange(0, TILE), right * TILE + tl.arange(0, TILE)
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
        most = tl.max(bits, 0).to(tl.float32, bitcast=True)
        tl.store(over_columns + down.to(tl.int64) * k + columns, most, columns < k)


@triton.jit
def _turn_kernel(x, turned, m, k, stride, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    across = tl.cdiv(k, TILE_K)
    rows = (tl.program_id(0) // across) * TILE_M + tl.arange(0, TILE_M)
    columns = (tl.program_id(0) % across) * TILE_K + tl.arange(0, TILE_K)
    inside = (rows[:, None] < m) & (columns[None, :] < k)
    tile = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], inside, 0)
    inside = (columns[:, None] < k) & (rows[None, :] < m)
    tl.store(turned + columns.to(tl.int64)[:, None] * m + rows[None, :], tl.trans(tile), inside)


def fp8_cast(
    x: Tensor, factor: Tensor | None, scale: Tensor | None, dtype: torch.dtype | None,
    scale_t: Tensor | None, dtype_t: torch.dtype | None,
    divide: bool = False, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``semantic.fp8_casts.fp8_cast``. Raises ValueError if the shape or dtype of a scale, or of
    a factor, is not allowed, and RuntimeError if the GPU has no instructions for FP8."""
    results = q, qt = cast_results(x, factor, scale, dtype, scale_t, dtype_t)
    if x.stride(1) != 1 and x.stride(0) == 1:  # the transpose is the one with contiguous rows
        x, q, qt = x.t(), qt, q
        others = (scale_t, scale, factor, weight)
        scale, scale_t, factor, weight = (v if v is None else v.t() for v in others)
    _launch(_cast_kernel, _cast_tile, x, (factor, weight, scale, scale_t), (q, qt), divide)
    return results


def fp8_amax(x: Tensor, factor: Tensor | None, row: bool, col: bool) -> tuple[Tensor, Tensor]:
    """As ``semantic.fp8_casts.fp8_amax``. Raises the same errors as :func:`fp8_cast`."""
    results = amax_results(x, factor, row, col)
    _launch(_amax_kernel, lambda *_: (TILE, _WARPS[col]), x, (factor,), results, row, col)
    return results


def fp8_turn(weight: Tensor, after: Tensor) -> Tensor:  # noqa: ARG001 (only an order)
    """As ``semantic.fp8_casts.fp8_turn``. Bytes are moved, so that NaN keeps its bits too."""
    turned = weight.new_empty(weight.shape[::-1])
    bytes_ = weight.contiguous().view(torch.uint8), turned.view(torch.uint8)
    _launch(_turn_kernel, lambda _k: (TILE, TILE, 8), bytes_[0], (), bytes_[1:])
    return turned


def _launch(
    kernel: Any, tile: Callable[..., tuple], x: Tensor, vectors: Sequence[Tensor | None],
    results: Sequence[Tensor], *flags: bool,
) -> None:  # fmt: skip
    """Launch ``kernel`` on ``x`` (M, K), its factors and scales, and the contiguous ``results``.
    ``tile``: the sizes of a tile and its warps; ``flags``: further constants of the kernel."""
    key: Hashable = None
    if _current(x):
        key = (id(kernel), x.device.index, *flags, *map(_layout, (x, *vectors, *results)))
        if (launch := _launchers.get(key)) is not None:
            launch(x, *[x if v is None else v for v in vectors], *results)
            return
    if not x.numel():
        return
    if _lacks_fp8(x.device):
        raise RuntimeError("its GPU has no instructions for FP8")
    (m, k), matrix = x.shape, x if x.stride(1) == 1 else x.contiguous()
    dense = [v if v is None else v.contiguous() for v in vectors]
    kinds = [_broadcast(v, m, k, *(HALF if i == 1 else ())) for i, v in enumerate(dense)]
    *sizes, warps = tile(k, *kinds, *flags)
    rest = (m, k, matrix.stride(0), *kinds, *flags, *sizes)
    blocks = triton.cdiv(m, sizes[0]) * triton.cdiv(k, sizes[-1]), 1, 1
    args = (matrix, *(matrix if v is None else v for v in dense), *results)
    with torch.cuda.device(x.get_device()):  # none for a tensor on a CPU
        compiled = kernel[blocks](*args, *rest, num_warps=warps)
    if matrix is not x or any(a is not b for a, b in zip(dense, vectors, strict=True)):
        return  # copied, and the next one must be copied too
    if key is not None and hasattr(compiled, "__getitem__"):  # Triton's interpreter has none
        if len(_launchers) >= _MOST:
            _launchers.clear()
        launch = compiled[blocks]
        _launchers[key] = lambda *others: launch(*others, *rest)


def _cast_tile(
    k: int, _factor: int, _weight: int, _scale: int, scale_t: int, _divide: bool
) -> tuple[int, int, int]:
    columns = _TURNED if scale_t else min(_STRAIGHT, triton.next_power_of_2(k))
    return _TILE // columns, columns, 4


def _current(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.current_device() == x.device.index


def _layout(x: Tensor | None) -> Hashable:
    return x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)


def _broadcast(vector: Tensor | None, m: int, k: int, *more: torch.dtype) -> int:
    if vector is None:
        return _NONE
    kinds = {(m, 1): _ROWS, (1, k): _COLUMNS, (1, 1): _ONE, (1,): _ONE, (): _ONE}
    shape = tuple(vector.shape)
    if vector.dtype not in (torch.float32, *more) or shape not in kinds:
        raise ValueError(
            f"scales of ({m}, {k}) are float32, one a row or column, not {vector.dtype} {shape}"
        )
    return kinds[shape]


@functools.cache
def _lacks_fp8(device: torch.device) -> bool:
    """Does the GPU lack instructions for casts to FP8? The kernels rely on their saturation."""
    cuda = torch.version.cuda is not None
    return device.type == "cuda" and not (cuda and "casts" in arch_of(device).features)
