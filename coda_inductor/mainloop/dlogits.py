# SPDX-License-Identifier: Apache-2.0
"""Compute the gradient of a slice of the logits in Triton, in one pass over the slice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _dlogits_kernel(
    logits, lse, target, scale, dlse, dentropy, entropy, out, stride, first, columns, smoothing,
    spread, cap,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, PENALIZED: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + first + column, inside, 0.0).to(tl.float32)
    logs = x - tl.load(lse + row)
    p = tl.exp(logs)
    hit = first + column == tl.load(target + row)
    away = tl.where(hit, 1.0 - smoothing, 0.0) + spread
    gradient = tl.load(scale + row) * (p - away)
    if PENALIZED:
        gradient += tl.load(dlse + row) * p
    if SPREAD:
        slope = tl.where(p > 0, p * (logs + tl.load(entropy + row)), 0.0)
        gradient -= tl.load(dentropy + row) * slope
    if CAPPED:
        t = x / cap
        gradient = gradient * (1.0 - t * t)
    tl.store(out + row * columns + column, gradient.to(out.dtype.element_ty), inside)


def dlogits(
    rows: Tensor, first: int, last: int, target: Tensor, lse: Tensor, scale: Tensor,
    dlse: Tensor | None, entropy: tuple[Tensor, Tensor] | None, smoothing: float, cap: float,
) -> Tensor:  # fmt: skip
    """As ``runtime.linear_cross_entropy.dlogits``, in float32."""
    m, v = rows.shape
    columns = last - first
    unread = scale, scale
    dentropy, rows_entropy = (t.contiguous() for t in entropy or unread)
    out = torch.empty(m, columns, dtype=rows.dtype, device=rows.device)
    if m:
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        grid = (m, triton.cdiv(columns, _BLOCK))
        with torch.cuda.device(rows.get_device()):  # none for a tensor on a CPU
            _dlogits_kernel[grid](
                rows, lse.contiguous(), target.contiguous(), scale,
                scale if dlse is None else dlse.contiguous(), dentropy, rows_entropy, out,
                rows.stride(0), first, columns, smoothing, smoothing / v,
                cap, BLOCK=_BLOCK, CAPPED=cap != 0, PENALIZED=dlse is not None,
                SPREAD=entropy is not None,
            )  # fmt: skip
    return out
