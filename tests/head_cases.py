# SPDX-License-Identifier: Apache-2.0
"""Gradients of heads, for the tests of the op and of its kernel: arguments, and how near."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: (B, H, T, D): ragged tokens, heads that leave a group half empty, sizes that are no power of 2.
SHAPES = ((2, 3, 37, 16), (1, 9, 5, 24), (3, 1, 1, 8))
NAMES = ("dz", "scaled", "dweight")


def cases(dtype: torch.dtype, shapes=SHAPES, device: str = "cpu") -> Iterator[tuple[Any, ...]]:
    """Arguments of the op: rotations of every kind, with and without norm, weight and scale."""
    for shape in shapes:
        for neighbours, paired, inverse in itertools.product((False, True), repeat=3):
            for norm, weighted, scaled in ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 1)):
                how = (norm, weighted, scaled)
                yield arguments(shape, dtype, neighbours, paired, inverse, how, device)


def arguments(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    neighbours: bool = False,
    paired: bool = False,
    inverse: bool = True,
    how: tuple[int, int, int] = (1, 1, 1),
    device: str = "cpu",
) -> tuple[Any, ...]:
    """``how``: is there a norm, its weight, a scale? Heads are views of rows, one of them of some
    columns of longer rows."""
    b, h, t, d = shape
    norm, weighted, scaled = how

    def heads(width: int) -> Tensor:
        rows = torch.randn(b, t, width, device=device).to(dtype)
        return rows[..., : h * d].view(b, t, h, d).transpose(1, 2)

    tables = [torch.randn(b if weighted else 1, 1, t, d // 2 if paired else d, device=device)
              for _ in range(2)]  # fmt: skip
    return (
        heads(h * d),
        *(x.to(dtype) for x in tables),
        heads(h * d + 8) if norm else None,
        torch.randn(d, device=device).to(dtype) if weighted else None,
        torch.rand(b * t, 1, device=device) + 0.5 if scaled else None,
        1e-6,
        1 if neighbours else d // 2,
        paired,
        inverse,
        bool(weighted),
    )


def error(have: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``."""
    return float((have.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def in_float32(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.float() if isinstance(a, Tensor) else a for a in args)
