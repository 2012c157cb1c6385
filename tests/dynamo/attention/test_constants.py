# SPDX-License-Identifier: Apache-2.0
"""0-dim constants on a tile have the value that their dtype gives them, as in torch."""

from __future__ import annotations

import math

import pytest
import torch
from checking import check, randn

FULL = [
    (3.7, torch.int64), (-3.7, torch.int32), (-1, torch.uint8), (2.5, torch.bool), (0, torch.bool),
    (0.1, torch.bfloat16), (0.1, torch.float16), (1e6, torch.float16), (0.1, torch.float32),
    (0.1, torch.float64), (math.inf, torch.float32), (True, torch.float32),
]  # fmt: skip


def full(number, dtype):
    return torch.full((), number, dtype=dtype)


def scalar_tensor(number, dtype):
    return torch.scalar_tensor(number, dtype=dtype)


USES = {
    "sub": lambda z, c: z - c * 2,
    "add": lambda z, c: torch.add(z, c, alpha=3),
    "maximum": lambda z, c: torch.maximum(z, c.to(z.dtype)),
    "value of where": lambda z, c: torch.where(z > 0, z * 2, c),
    "condition of where": lambda z, c: torch.where(c != 0, z * 2, z),
    "condition": lambda z, c: torch.where(c.bool(), z * 2, z),
    "or": lambda z, c: torch.where(torch.logical_or(z > 0, c), z * 2, z),
    "and": lambda z, c: torch.where(torch.logical_and(z > 0, c), z * 2, z),
}


@pytest.mark.parametrize(
    ("number", "dtype", "make"), [*((*each, full) for each in FULL), (*FULL[0], scalar_tensor)]
)
def test_constants_have_their_dtype(number, dtype, make):
    def function(x, w):
        return (x @ w) * make(number, dtype)

    assert check(function, randn(6, 8), randn(8, 10)).fused


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("number", "dtype"), [FULL[0], FULL[3], FULL[4]], ids=str)
def test_wherever_they_are_read(number, dtype, use):
    def function(x, w):
        return USES[use](x @ w, full(number, dtype))

    check(function, randn(6, 8), randn(8, 10))


def test_a_number_that_is_complex_is_no_constant():
    def function(x, w):
        return (x @ w) * torch.full((), 2.0, dtype=torch.complex128)

    assert not check(function, randn(6, 8), randn(8, 10)).fused
