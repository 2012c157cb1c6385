# SPDX-License-Identifier: Apache-2.0
"""Tensors that are hard to quantize, and what torchao 0.18 makes of a tensor in FP8."""

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
    infinities = (2, 0, -torch.inf), (2, -1, torch.inf)
    for row, column, value in (
        (0, slice(None), 0.0), (1, k // 2, torch.nan), *infinities, (3, -1, 1000.0),
    ):  # fmt: skip
        if row < len(special):
            special[row, column] = value
    special[4:5, 1:] *= 2.0**-12
    return x.to(device)


def scale_of(x: Tensor, dims: list[int], dtype: torch.dtype, *, power: bool = False) -> Tensor:
    """The scale that torchao gives ``x``: one for each slice over ``dims``, or for all of it."""
    amax = x.abs().amax(dims, keepdim=True) if dims else x.abs().max()
    scale = (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=1e-12)).to(torch.float32)
    return scale.log2().floor().exp2() if power else scale


def cast_of(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
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
