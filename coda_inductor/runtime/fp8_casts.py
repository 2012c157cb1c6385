# SPDX-License-Identifier: Apache-2.0
"""Two custom ops on a whole tensor, for use before it is multiplied in FP8.

``coda_inductor::fp8_cast`` reads a tensor once and writes it in FP8: in its layout, transposed, or
both, each with its own scale and FP8 dtype. ``coda_inductor::fp8_amax`` reads a tensor once for the
maxima that scales need: of rows, of columns, or both, as partials over tiles.

On CUDA each is one Triton kernel (``mainloop/fp8_casts.py``), elsewhere plain torch. Both give the
same bits as torchao's own chains of ops; only the sign of a NaN may differ.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_inductor.log import warn_once
from coda_inductor.semantic.fp8 import AMAX, CAST

_LIBRARY = torch.library.Library("coda_inductor", "FRAGMENT")
#: Rows and columns of the tiles of partial maxima.
TILE = 128
#: The dtype of a result that is not needed.
_NONE = torch.float8_e4m3fn


def fp8_cast(
    x: Tensor,
    factor: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype | None,
    scale_t: Tensor | None,
    dtype_t: torch.dtype | None,
    divide: bool = False,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x`` (M, K), of 16 or 32 bits, in FP8, in one or two layouts.

    Args:
        x: any strides; contiguous rows or columns are read in place.
        factor: (M, 1) float32, a row factor of ``x`` (a norm's rstd), or None.
        scale: the factor of the first result: float32, (M, 1), (1, K) or one element. None if the
            first result is not needed.
        dtype: the first result's, an FP8 dtype; None if ``scale`` is.
        scale_t: as ``scale``, in terms of ``x``'s rows and columns, for the second result.
        dtype_t: the second result's.
        divide: whether to divide by the scales instead, as inference does.
        weight: (1, K) of 16 or 32 bits, a column factor of ``x`` (a norm's weight), or None.

    Returns:
        q (M, K) row-major and qt (K, M) row-major: ``float32(x) * factor * weight * scale``,
        clamped to the dtype's finite values (inf too; NaN stays) and rounded to the nearest. A
        result that is not needed has the shape (0,).
    """
    wide = x.to(torch.float32)
    if factor is not None:
        wide = wide * factor
    if weight is not None:
        wide = wide * weight.to(torch.float32)
    q, qt = _outputs(x, scale, dtype, scale_t, dtype_t)
    if scale is not None:
        q.copy_(_round(wide / scale if divide else wide * scale, q.dtype))
    if scale_t is not None:
        qt.copy_(_round(wide / scale_t if divide else wide * scale_t, qt.dtype).t())
    return q, qt


def _round(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return scaled.clamp(min=-largest, max=largest).to(dtype)


def fp8_amax(x: Tensor, factor: Tensor | None, row: bool, col: bool) -> tuple[Tensor, Tensor]:
    """Partial maxima of ``|float32(x) * factor|``, float32; NaN if a value is NaN.

    Args:
        x: (M, K), of 16 or 32 bits.
        factor: as for :func:`fp8_cast`.
        row: whether maxima of rows are needed.
        col: whether maxima of columns are needed.

    Returns:
        rows (M, ceil(K / TILE)): of each row's elements in each tile; ``rows.amax(1)`` is the
        row's. cols (ceil(M / TILE), K): of each column's; ``cols.amax(0)`` is the column's. The
        amax of either is the tensor's. A result that is not needed has the shape (0,).
    """
    rows, cols = _partials(x, row, col)
    if not x.numel():
        return rows, cols
    wide = x.to(torch.float32).abs()
    if factor is not None:
        wide = wide * factor.abs()
    m, k = wide.shape
    if row:
        torch.amax(F.pad(wide, (0, -k % TILE)).view(m, -1, TILE), 2, out=rows)
    if col:
        torch.amax(F.pad(wide, (0, 0, 0, -m % TILE)).view(-1, TILE, k), 1, out=cols)
    return rows, cols


def _partials(x: Tensor, row: bool, col: bool) -> tuple[Tensor, Tensor]:
    """Uninitialized results of :func:`fp8_amax`."""
    m, k = x.shape
    rows = (m, (k + TILE - 1) // TILE) if row else 0
    cols = ((m + TILE - 1) // TILE, k) if col else 0
    return x.new_empty(rows, dtype=torch.float32), x.new_empty(cols, dtype=torch.float32)


def _outputs(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype | None,
    scale_t: Tensor | None,
    dtype_t: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Uninitialized results of :func:`fp8_cast`."""
    m, k = x.shape
    q = x.new_empty(0 if scale is None else (m, k), dtype=dtype or _NONE)
    return q, x.new_empty(0 if scale_t is None else (k, m), dtype=dtype_t or _NONE)


@torch.library.register_fake("coda_inductor::fp8_cast", lib=_LIBRARY)
def _fake_cast(x, factor, scale, dtype, scale_t, dtype_t, divide=False, weight=None):  # noqa: ARG001
    return _outputs(x, scale, dtype, scale_t, dtype_t)


@torch.library.register_fake("coda_inductor::fp8_amax", lib=_LIBRARY)
def _fake_amax(x, factor, row, col):  # noqa: ARG001 (the op's signature)
    return _partials(x, row, col)


def _cast_cuda(x, factor, scale, dtype, scale_t, dtype_t, divide=False, weight=None):
    q, qt = _outputs(x, scale, dtype, scale_t, dtype_t)
    if x.numel() and not _launched("cast", x, factor, scale, scale_t, q, qt, divide, weight):
        return fp8_cast(x, factor, scale, dtype, scale_t, dtype_t, divide, weight)
    return q, qt


def _amax_cuda(x, factor, row, col):
    rows, cols = _partials(x, row, col)
    if x.numel() and not _launched("amax", x, factor, rows, cols, TILE):
        return fp8_amax(x, factor, row, col)
    return rows, cols


def _launched(kernel: str, x: Tensor, *others: object) -> bool:
    try:
        if _has_fp8(x.device):
            from coda_inductor.mainloop import fp8_casts

            getattr(fp8_casts, kernel)(x, *others)
            return True
        cause = "its GPU has no instructions for FP8"
    except Exception as error:
        cause = repr(error)
    warn_once(f"fp8_{kernel}", cause, to="torch's ops")
    return False


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    """Does the GPU have instructions for casts to FP8? The kernels rely on their saturation."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)


def _direct_cast(x, *others):
    """The op without the dispatcher (``runtime.direct``)."""
    return _cast_cuda(x, *others) if x.is_cuda else CAST(x, *others)


def _direct_amax(x, *others):
    """As :func:`_direct_cast`."""
    return _amax_cuda(x, *others) if x.is_cuda else AMAX(x, *others)


CAST.direct, AMAX.direct = _direct_cast, _direct_amax  # type: ignore[attr-defined]
_LIBRARY.impl("fp8_cast", fp8_cast, "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_amax", fp8_amax, "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_cast", _cast_cuda, "CUDA")
_LIBRARY.impl("fp8_amax", _amax_cuda, "CUDA")
