# SPDX-License-Identifier: Apache-2.0
"""Equal steps become one, a spelled logistic function a sigmoid, what nothing reads goes; what only
looks alike stays."""

from __future__ import annotations

import pytest
import torch

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


LOGISTIC = {
    "silu": ((Step("y", "div", ("t", "d")),), ["sigmoid", "mul"]),
    "sigmoid": ((Step("y", "div", (1.0, "d")),), ["sigmoid"]),
    "reciprocal": ((Step("y", "reciprocal", ("d",)),), ["sigmoid"]),
    "twice": ((Step("s", "reciprocal", ("d",)), Step("y", "div", ("s", "d"))), ["sigmoid", "mul"]),
    "denominator read again": (
        (Step("z", "div", ("t", "d")), Step("y", "add", ("z", "d"))),
        ["neg", "exp", "add", "sigmoid", "mul", "add"],
    ),
}


@pytest.mark.parametrize("name", LOGISTIC)
def test_a_spelled_logistic_function_is_a_sigmoid(name):
    tail, ops = LOGISTIC[name]
    head = [Step("n", "neg", ("t",)), Step("e", "exp", ("n",)), Step("d", "add", ("e", 1.0))]
    long = program(Step("unused", "exp", ("acc",)), *head, *tail, values=("y",))
    short = verify(simplify(long))
    assert [step.op for step in short.steps] == ops
    torch.testing.assert_close(run(short), run(long))


@pytest.mark.parametrize(
    "steps",
    [
        [("neg", "t"), ("exp", "v0"), ("add", "v1", 2.0), ("div", "t", "v2")],
        [("neg", "t"), ("exp", "t"), ("add", "v1", 1.0), ("div", "v0", "v2")],
        [("neg", "t"), ("exp2", "v0"), ("add", "v1", 1.0), ("div", "t", "v2")],
        [("neg", "t"), ("exp", "v0"), ("sub", 1.0, "v1"), ("div", "t", "v2")],
        [("neg", "t"), ("exp", "v0"), ("add", "v1", 1.0), ("div", "v2", "t")],
    ],
    ids=["other constant", "no minus", "exp2", "difference", "denominator above"],
)
def test_what_only_looks_like_a_logistic_function_stays(steps):
    made = [Step(f"v{i}", op, tuple(args)) for i, (op, *args) in enumerate(steps)]
    chosen = program(*made, values=("v3",))
    assert simplify(chosen) == chosen


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
