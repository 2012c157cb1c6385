# SPDX-License-Identifier: Apache-2.0
"""Programs of FP8: dtypes of A and B, stores that saturate, what rounds where."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from coda_inductor.program import (
    EpilogueProgram,
    Operand,
    Reduce,
    Step,
    Store,
    consistent,
    reference,
    simplify,
    verify,
)
from coda_inductor.program.dtypes import FP8, WIDTHS
from coda_inductor.program.scales import Scaled, scaled

M, N, K = 24, 32, 48
E4M3, E5M2 = FP8

#: As a projection of torchao's: both scales, then a statistic of what is stored.
SCALED = EpilogueProgram(
    accs=("acc",),
    a_dtype=E4M3,
    b_dtype=E5M2,
    operands=(Operand("r", "col", "float32"), Operand("w", "row", "float32")),
    steps=(
        Step("x", "mul", ("acc", "r")),
        Step("y", "mul", ("x", "w")),
        Step("size", "abs", ("y",)),
    ),
    stores=(Store("out0", "y", "bfloat16"),),
    reduces=(Reduce("top", "size", "row", "max"), Reduce("left", "size", "col", "max")),
)


def operands(a_dtype=E4M3, b_dtype=E5M2):
    a, b = torch.randn(M, K), torch.randn(N, K)
    return a.to(getattr(torch, a_dtype)), b.to(getattr(torch, b_dtype)).t()


def stored(value: str, dtype: str, *steps: Step, **fields) -> EpilogueProgram:
    fields = {"stores": (Store("out0", value, dtype),), **fields}
    return EpilogueProgram(("acc",), E4M3, steps=steps, **fields)


def test_dtypes_are_kept_and_part_of_what_a_program_is():
    program = verify(simplify(consistent(replace(SCALED, fast=True))))
    again = EpilogueProgram.from_json(program.to_json())
    assert again == program
    assert (again.a_dtype, again.b_dtype, again.fast) == (E4M3, E5M2, True)
    assert str(again).splitlines()[0] == f"program(acc: {E4M3} x {E5M2}), fast accumulation"
    others = [replace(program, fast=False), replace(program, b_dtype=E4M3)]
    assert len({program.key, *(other.key for other in others)}) == 3
    assert EpilogueProgram(("acc",), E5M2).b_dtype == E5M2
    assert WIDTHS[E4M3] == WIDTHS[E5M2] == 1


def test_a_product_that_is_rounded_is_rounded_to_bfloat16():
    program, (a, b) = stored("acc", "float32"), operands(b_dtype=E4M3)
    (exact,) = reference.run(program, [a], [b], [])
    (rounded,) = reference.run(program, [a], [b], [], exact=False)
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)
    assert program.product_dtype == "bfloat16"


EDGES = [0.0, -0.0, 1e-9, 0.3, 447.0, 449.0, -1e30, math.inf, -math.inf, math.nan, 57345.0]


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", FP8)
def test_a_store_saturates_as_torchaos_clamp_and_cast_do(dtype, wide):
    program = stored("x", dtype, Step("x", "mul", ("acc", "t")))
    program = verify(replace(program, operands=(Operand("t", "row", "float32"),)))
    one = torch.ones(1, 16).to(torch.float8_e4m3fn)
    a, b = (one, one[:, :1].expand(16, len(EDGES))) if wide == torch.float32 else (
        one.double(), one[:, :1].double().expand(16, len(EDGES)))  # fmt: skip
    values = torch.tensor(EDGES)
    (got,) = reference.run(program, [a], [b], [values])
    largest = torch.finfo(getattr(torch, dtype)).max
    want = (16 * values.to(wide)).clamp(min=-largest, max=largest).to(getattr(torch, dtype))
    assert got.dtype == want.dtype
    assert torch.equal(got.view(torch.uint8)[0], want.view(torch.uint8))
    step = stored("x", "float32", Step("x", f"round_{dtype}", ("acc",)))
    again = reference.OPS[step.steps[0].op].torch(16 * values.to(wide))
    torch.testing.assert_close(again, want.to(wide), rtol=0, atol=0, equal_nan=True)


def test_nan_and_inf_in_a_row_reach_its_maximum():
    program = verify(simplify(consistent(SCALED)))
    (a, b), r, w = operands(), torch.ones(M), torch.ones(N)
    r[3], r[5], r[7] = math.nan, math.inf, 0.0
    _, top, left = reference.run(program, [a], [b], [r, w])
    assert top[3].isnan()
    assert (top[5], top[7]) == (math.inf, 0)
    assert top[[0, 1, 2, 4, 6]].isfinite().all()
    assert left.isnan().all()


def test_an_unfused_product_is_rounded_behind_its_scales():
    program = verify(simplify(consistent(SCALED)))
    (a, b), r, w = operands(), torch.rand(M) + 0.5, torch.rand(N) + 0.5
    y, top, _ = reference.run(program, [a], [b], [r, w], exact=False)
    want = ((a.float() @ b.float()) * r[:, None] * w).bfloat16()
    assert torch.equal(y, want)
    assert torch.equal(top, want.float().abs().amax(1, keepdim=True))
    assert scaled(program)["acc"] == Scaled("y", ("x", "y"), "r", "w")


def chain(*steps, operands, **fields):
    made = EpilogueProgram(
        ("acc",), E4M3, operands, steps, (Store("out0", steps[-1].name, "bfloat16"),)
    )
    return scaled(replace(made, **fields))["acc"]


R, W, S = (Operand(n, k, "float32") for n, k in (("r", "col"), ("w", "row"), ("s", "scalar")))


def test_what_counts_as_a_scale_of_a_product():
    x, y = Step("x", "mul", ("acc", "r")), Step("y", "mul", ("s", "x"))
    assert chain(x, y, operands=(R, S)) == Scaled("y", ("x", "y"), "r", None, ("s",))
    twice = Step("y", "mul", ("x", "r2"))
    r2 = replace(R, name="r2")
    assert chain(x, twice, operands=(R, r2)) == Scaled("x", ("x",), "r")
    third = Step("z", "mul", ("y", "w"))
    assert chain(x, y, third, operands=(R, S, W)).value == "y"
    assert chain(x, y, operands=(R, S), a_dtype="bfloat16", b_dtype="") == Scaled("acc")
    assert chain(Step("x", "mul", ("acc", "acc")), operands=()) == Scaled("acc")
    assert chain(Step("x", "mul", ("acc", 2.0)), operands=()) == Scaled("acc")
    assert chain(Step("x", "add", ("acc", "r")), operands=(R,)) == Scaled("acc")
    half = replace(R, dtype="bfloat16")
    assert chain(x, operands=(half,)) == Scaled("acc")
    assert chain(x, Step("y", "add", ("x", "acc")), operands=(R,)) == Scaled("acc")
    assert chain(x, operands=(R,), stores=(Store("a", "acc", "float32"),)) == Scaled("acc")


def test_a_pair_has_scales_of_its_own():
    steps = (
        Step("g0", "mul", ("acc0", "r")),
        Step("g", "mul", ("g0", "wg")),
        Step("u0", "mul", ("acc1", "r")),
        Step("u", "mul", ("u0", "wu")),
        Step("y", "mul", ("g", "u")),
    )
    rows = (R, replace(W, name="wg"), replace(W, name="wu"))
    program = verify(
        EpilogueProgram(("acc0", "acc1"), E4M3, rows, steps, (Store("o", "y", "float32"),))
    )
    (a, b0), (_, b1) = operands(b_dtype=E4M3), operands(b_dtype=E4M3)
    r, wg, wu = torch.rand(M), torch.rand(N), torch.rand(N)
    given = [r, wg.repeat_interleave(2), wu.repeat_interleave(2)]
    wanted = [((a.float() @ b.float()) * r[:, None] * w) for b, w in ((b0, wg), (b1, wu))]
    (exact,) = reference.run(program, [a], [b0, b1], given)
    (rounded,) = reference.run(program, [a], [b0, b1], given, exact=False)
    torch.testing.assert_close(exact, wanted[0] * wanted[1])
    assert torch.equal(rounded, wanted[0].bfloat16().float() * wanted[1].bfloat16().float())
