# SPDX-License-Identifier: Apache-2.0
"""Equal steps become one, a spelled logistic function a sigmoid, what nothing reads goes; what only
looks alike stays."""

from __future__ import annotations

import pytest
import torch
from programs import parsed

from coda_inductor.program import EpilogueProgram, reference, simplify, verify


def program(steps: str, stores: str, reduces: str = "") -> EpilogueProgram:
    return verify(parsed("float64", "t:tile u:tile", steps, stores, reduces))


def run(chosen: EpilogueProgram) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b, t, u = (torch.randn(6, 6, dtype=torch.float64, generator=generator) for _ in range(4))
    return reference.run(chosen, [a], [b], [t, u])


def test_equal_steps_become_the_first_of_them_to_any_depth():
    long = program(
        "s0 sigmoid t; s1 sigmoid t; y0 mul t s0; y1 mul s1 t; z0 add y0 acc; z1 add y1 acc;"
        "d sub z1 u",
        "z0 d",
        "part0:z1",
    )
    short = verify(simplify(long))
    assert [step.name for step in short.steps] == ["s0", "y0", "z0", "d"]
    assert short.steps[-1].args == ("z0", "u")
    assert [output.value for output in short.outputs] == ["z0", "d", "z0"]
    for x, y in zip(run(short), run(long), strict=True):
        assert torch.equal(x, y)
    assert simplify(short) == short


@pytest.mark.parametrize(
    ("tail", "ops"),
    [
        ("y div t d", "sigmoid mul"),
        ("y div 1 d", "sigmoid"),
        ("y reciprocal d", "sigmoid"),
        ("s reciprocal d; y div s d", "sigmoid mul"),
        ("z div t d; y add z d", "neg exp add sigmoid mul add"),  # the denominator is read again
    ],
)
def test_a_spelled_logistic_function_is_a_sigmoid(tail, ops):
    long = program(f"unused exp acc; n neg t; e exp n; d add e 1; {tail}", "y")
    short = verify(simplify(long))
    assert [step.op for step in short.steps] == ops.split()
    torch.testing.assert_close(run(short), run(long))


@pytest.mark.parametrize(
    "steps",
    [
        "n neg t; e exp n; d add e 2; y div t d",
        "n neg t; e exp t; d add e 1; y div n d",
        "n neg t; e exp2 n; d add e 1; y div t d",
        "n neg t; e exp n; d sub 1 e; y div t d",
        "n neg t; e exp n; d add e 1; y div d t",
        "x sub t u; z sub u t; y add x z",
        "x div t u; z div u t; y add x z",
        "x mul t 2; z mul t 2.5; y add x z",
        "x add t 0; z add t -0.0; y add x z",
        "x maximum t u; z minimum t u; y add x z",
        "x add t u; z add t acc; y add x z",
        "less lt t u; x where less t u; z where less u t; y add x z",
    ],
)
def test_what_only_looks_equal_or_like_a_logistic_function_stays(steps):
    chosen = program(steps, "y")
    assert simplify(chosen) == chosen


@pytest.mark.parametrize("op", ["add", "mul", "maximum", "minimum"])
def test_commutative_ops_are_equal_in_either_order(op):
    for left, right in (("t", "u"), ("t", 2)):
        chosen = program(f"x {op} {left} {right}; y {op} {right} {left}", "x y")
        assert [store.value for store in simplify(chosen).stores] == ["x", "x"]
