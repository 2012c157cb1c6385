# SPDX-License-Identifier: Apache-2.0
"""Programs that know heads: what they mean, which are legal, what is part of their identity."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from coda_inductor.errors import ProgramError
from coda_inductor.program import EpilogueProgram, Operand, Reduce, Step, Store, reference, verify
from coda_inductor.program.heads import swap

HEAD = 8
ROTARY = EpilogueProgram(
    ("acc",),
    "float64",
    operands=(Operand("t0", "table", "float64"), Operand("t1", "table", "float64")),
    steps=(
        Step("other", "swap", ("acc", 8.0, 4.0)),
        Step("x", "mul", ("acc", "t0")),
        Step("y", "mul", ("other", "t1")),
        Step("z", "add", ("x", "y")),
    ),
    stores=(Store("out0", "z", "float64"),),
    head=HEAD,
)


def factors(m: int = 3, n: int = 3 * HEAD, k: int = 5):
    return torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def test_rotary_is_hugging_faces():
    a, b = factors()
    cos, sin = torch.randn(2, 3, HEAD, dtype=torch.float64)
    signed = sin * torch.cat((-torch.ones(4), torch.ones(4)))
    (got,) = reference.run(verify(ROTARY), [a], [b], [cos, signed])
    x = (a @ b).unflatten(-1, (-1, HEAD))
    wanted = x * cos[:, None] + rotate_half(x) * sin[:, None]
    torch.testing.assert_close(got, wanted.flatten(-2))


@pytest.mark.parametrize(("width", "distance"), [(8, 4), (8, 1), (4, 2), (8, 2), (4, 1)])
def test_a_swap_is_its_own_inverse_and_stays_in_its_head(width, distance):
    x = torch.arange(2 * HEAD)
    y = swap(x, HEAD, width, distance)
    assert torch.equal(swap(y, HEAD, width, distance), x)
    moved = (y - x).abs()
    assert set(moved.tolist()) <= {0, distance}
    assert (moved == 0).sum() == 2 * (HEAD - width)


def test_the_head_is_part_of_text_and_identity():
    assert EpilogueProgram.from_json(ROTARY.to_json()) == ROTARY
    assert "heads of 8" in str(ROTARY)
    assert dataclasses.replace(ROTARY, head=16).key != ROTARY.key


def replaced(program, name, **fields):
    steps = tuple(dataclasses.replace(s, **fields) if s.name == name else s for s in program.steps)
    return dataclasses.replace(program, steps=steps)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            dataclasses.replace(ROTARY, head=0),
            "heads of 0 columns in a program with 1 swaps, 2 tables",
        ),
        (
            EpilogueProgram(("acc",), "float64", stores=(Store("o", "acc", "float64"),), head=8),
            "heads of 8 columns in a program with 0 swaps, 0 tables",
        ),
        (replaced(ROTARY, "other", args=("acc", 16.0, 8.0)), "no pairs"),
        (replaced(ROTARY, "other", args=("acc", 8.0, 3.0)), "no pairs"),
        (replaced(ROTARY, "other", args=("acc", 8.0, 0.0)), "no pairs"),
        (replaced(ROTARY, "other", args=("acc", 7.5, 1.0)), "no pairs"),
        (replaced(ROTARY, "other", args=("acc", 8.0)), "takes 3 arguments"),
        (replaced(ROTARY, "other", args=("t0", 8.0, 4.0)), "no accumulator"),
        (dataclasses.replace(ROTARY, reduces=(Reduce("p", "z"),)), "no sums"),
        (
            dataclasses.replace(ROTARY, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn"),
            "of one accumulator, of 16 bits",
        ),
    ],
)
def test_what_is_not_legal(program, why):
    with pytest.raises(ProgramError, match=why):
        verify(program)
