# SPDX-License-Identifier: Apache-2.0
"""Equal steps of a program become one; what only looks equal does not."""

from __future__ import annotations

import pytest
import torch
from kinds import kinds

from coda_inductor.program import (
    EpilogueProgram,
    Operand,
    Reduce,
    Step,
    Store,
    reference,
    simplify,
    verify,
)


def program(*steps: Step, values: tuple[str, ...], reduces: tuple[Reduce, ...] = ()):
    """A float64 program that stores ``values``."""
    return verify(
        EpilogueProgram(
            accs=("acc",),
            a_dtype="float64",
            operands=(Operand("t", "tile", "float64"), Operand("u", "tile", "float64")),
            steps=steps,
            stores=tuple(Store(f"out{i}", value, "float64") for i, value in enumerate(values)),
            reduces=reduces,
        )
    )


def run(chosen: EpilogueProgram) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b, t, u = (torch.randn(6, 6, dtype=torch.float64, generator=generator) for _ in range(4))
    return reference.run(chosen, [a], [b], [t, u])


def test_equal_steps_become_the_first_of_them_to_any_depth():
    long = program(
        Step("s0", "sigmoid", ("t",), "forward"),
        Step("s1", "sigmoid", ("t",), "backward"),
        Step("y0", "mul", ("t", "s0")),
        Step("y1", "mul", ("s1", "t")),
        Step("z0", "add", ("y0", "acc")),
        Step("z1", "add", ("y1", "acc")),
        Step("d", "sub", ("z1", "u")),
        values=("z0", "d"),
        reduces=(Reduce("part0", "z1"),),
    )
    short = verify(simplify(long))
    assert [step.name for step in short.steps] == ["s0", "y0", "z0", "d"]
    assert short.steps[0].origin == "forward"
    assert short.steps[-1].args == ("z0", "u")
    assert [output.value for output in short.outputs] == ["z0", "d", "z0"]
    for x, y in zip(run(short), run(long), strict=True):
        assert torch.equal(x, y)
    assert simplify(short) == short


def test_the_same_logistic_function_spelled_twice_is_one_sigmoid():
    def spelled(i: int) -> list[Step]:
        return [
            Step(f"n{i}", "neg", ("t",)),
            Step(f"e{i}", "exp", (f"n{i}",)),
            Step(f"p{i}", "add", (f"e{i}", 1.0)),
        ]

    long = program(
        *spelled(0),
        Step("s", "reciprocal", ("p0",)),
        *spelled(1),
        Step("silu", "div", ("t", "p1")),
        values=("s", "silu"),
    )
    short = verify(simplify(long))
    assert [step.op for step in short.steps] == ["sigmoid", "mul"]
    for x, y in zip(run(short), run(long), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("sub", "t", "u"), ("sub", "u", "t")),
        (("div", "t", "u"), ("div", "u", "t")),
        (("mul", "t", 2.0), ("mul", "t", 2.5)),
        (("add", "t", 0.0), ("add", "t", -0.0)),
        (("maximum", "t", "u"), ("minimum", "t", "u")),
        (("add", "t", "u"), ("add", "t", "acc")),
        (("where", "less", "t", "u"), ("where", "less", "u", "t")),
    ],
)
def test_what_only_looks_equal_stays(first, second):
    less = [Step("less", "lt", ("t", "u"))] if first[0] == "where" else []
    steps = [Step(name, op, tuple(args)) for name, (op, *args) in (("x", first), ("y", second))]
    chosen = program(*less, *steps, values=("x", "y"))
    assert simplify(chosen) == chosen


@pytest.mark.parametrize("op", ["add", "mul", "maximum", "minimum"])
def test_commutative_ops_are_equal_in_either_order(op):
    for left, right in (("t", "u"), ("t", 2.0)):
        chosen = program(
            Step("x", op, (left, right)), Step("y", op, (right, left)), values=("x", "y")
        )
        assert [store.value for store in simplify(chosen).stores] == ["x", "x"]


@pytest.mark.parametrize("name", list(kinds()))
def test_measured_programs_are_as_short_as_they_get(name):
    assert simplify(kinds()[name]) == kinds()[name]
