# SPDX-License-Identifier: Apache-2.0
"""Tensors that are hard to quantize, and what torchao 0.18 makes of a tensor in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 1), (3, 5), (17, 1), (1, 130), (127, 129), (200, 300), (256, 128)]


def subject(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """(m, k), with a row of zeros, one with a NaN, one with both infinities, one with an outlier
    of a thousand times the rest, and one of values that are subnormal in FP8, as far as they fit.
    """
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype)
    special = x[m // 2 :]
    for row, write in enumerate((_zeros, _nan, _infinities, _outlier, _tiny)):
        if row < len(special):
            write(special[row])
    return x.to(device)


def _zeros(row: Tensor) -> None:
    row.zero_()


def _nan(row: Tensor) -> None:
    row[len(row) // 2] = torch.nan


def _infinities(row: Tensor) -> None:
    row[0], row[-1] = -torch.inf, torch.inf


def _outlier(row: Tensor) -> None:
    row[-1] = 1000.0


def _tiny(row: Tensor) -> None:
    row[1:] *= 2.0**-12


def scale_of(x: Tensor, dims: list[int], dtype: torch.dtype, *, power: bool = False) -> Tensor:
    """The scale that torchao gives ``x``: one for each slice over ``dims``, or for all of it."""
    amax = x.abs().amax(dims, keepdim=True) if dims else x.abs().max()
    scale = (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    return scale.log2().floor().exp2() if power else scale


def cast_of(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as torchao casts it."""
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) * scale).clamp(min=-largest, max=largest).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits, but for those of NaNs."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.itemsize == 1:
        bits = a.view(torch.uint8) == b.view(torch.uint8)
        return bool((bits | (a.float().isnan() & b.float().isnan())).all())
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
