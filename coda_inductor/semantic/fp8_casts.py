# SPDX-License-Identifier: Apache-2.0
"""Three ops on a whole tensor, for use before its product in FP8.

``coda_inductor::fp8_cast`` reads a tensor once and writes it in FP8: in its layout, transposed, or
both, each with its own scale and FP8 dtype. ``coda_inductor::fp8_amax`` reads a tensor once for the
maxima that scales need: of rows, of columns, or both, as partials over tiles.
``coda_inductor::fp8_turn`` transposes the bytes of a frozen weight for the backward pass.

On CUDA each is one Triton kernel (``mainloop/fp8_casts.py``), elsewhere plain torch. Both give the
same bits as torchao's own chains of ops; only the sign of a NaN may differ.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_inductor.semantic.define import opaque, schema_text

#: Rows and columns of the tiles of partial maxima.
TILE = 128
#: The dtype of a result that is not needed.
_NONE = torch.float8_e4m3fn


def saturated(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """``wide`` in the FP8 ``dtype``, clamped to its finite values (inf too; NaN stays)."""
    limit = torch.finfo(dtype).max
    return wide.clamp(min=-limit, max=limit).to(dtype)


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
    """Convert ``x`` (M, K), of 16 or 32 bits, to FP8, in one or two layouts.

    Args:
        x: any strides; contiguous rows or columns are read in place.
        factor: (M, 1) float32, a row factor of ``x`` (a norm's rstd), or None.
        scale: the factor of the first result: float32, (M, 1), (1, K) or one element. None if the
            first result is not needed.
        dtype: the first result's FP8 dtype; None if ``scale`` is None.
        scale_t: as ``scale``, in terms of ``x``'s rows and columns, for the second result.
        dtype_t: the second result's FP8 dtype.
        divide: divide by the scales instead, as inference does?
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
    q, qt = cast_results(x, factor, scale, dtype, scale_t, dtype_t)
    if scale is not None:
        q = saturated(wide / scale if divide else wide * scale, q.dtype).contiguous()
    if scale_t is not None:
        qt = saturated(wide / scale_t if divide else wide * scale_t, qt.dtype).t().contiguous()
    return q, qt


def cast_results(x, factor, scale, dtype, scale_t, dtype_t, *_):  # noqa: ARG001 (as the op)
    """Uninitialized results of :func:`fp8_cast`."""
    m, k = x.shape
    q = x.new_empty(0 if scale is None else (m, k), dtype=dtype or _NONE)
    return q, x.new_empty(0 if scale_t is None else (k, m), dtype=dtype_t or _NONE)


def fp8_amax(x: Tensor, factor: Tensor | None, row: bool, col: bool) -> tuple[Tensor, Tensor]:
    """Partial maxima of ``|float32(x) * factor|``, float32; NaN if a value is NaN.

    Args:
        x: (M, K), of 16 or 32 bits.
        factor: as for :func:`fp8_cast`.
        row: are maxima of rows needed?
        col: are maxima of columns needed?

    Returns:
        rows (M, ceil(K / TILE)): the maximum of each row in each tile; ``rows.amax(1)`` is the
        row's. cols (ceil(M / TILE), K): of each column; ``cols.amax(0)`` is the column's. The
        amax of either is the tensor's. A result that is not needed has the shape (0,).
    """
    rows, cols = amax_results(x, factor, row, col)
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


def amax_results(x, factor, row, col):  # noqa: ARG001 (as the op)
    """Uninitialized results of :func:`fp8_amax`."""
    m, k = x.shape
    rows = (m, (k + TILE - 1) // TILE) if row else 0
    cols = ((m + TILE - 1) // TILE, k) if col else 0
    return x.new_empty(rows, dtype=torch.float32), x.new_empty(cols, dtype=torch.float32)


def fp8_turn(weight: Tensor, after: Tensor) -> Tensor:  # noqa: ARG001 (only an order)
    """``weight`` (N, K), in FP8, as a row-major (K, N). ``after`` is not read: it is a tensor of
    the backward pass, so that no partitioner computes copies of all weights in the forward pass.
    """
    return weight.t().clone(memory_format=torch.contiguous_format)


_LAYOUT = torch.Tag.flexible_layout
CAST = opaque(schema_text(fp8_cast, "q qt"), fp8_cast, cast_results, _LAYOUT)
AMAX = opaque(schema_text(fp8_amax, "rows cols"), fp8_amax, amax_results, _LAYOUT)
TURN = opaque(
    schema_text(fp8_turn),
    fp8_turn,
    lambda weight, after: weight.new_empty(weight.shape[::-1]),  # noqa: ARG005 (the schema)
)
