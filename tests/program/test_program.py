# SPDX-License-Identifier: Apache-2.0
"""What a program is: legality, identity, text, and its meaning in plain torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from checking import randn

from coda_inductor import EpilogueProgram, ProgramError
from coda_inductor.program import OPS, Operand, Reduce, Step, Store, reference, verify

M, N, K = 5, 6, 7

RESIDUAL_NORM = EpilogueProgram(
    accs=("acc",),
    a_dtype="bfloat16",
    operands=(Operand("c0", "tile", "bfloat16"), Operand("w0", "row", "float32")),
    steps=(
        Step("x", "add", ("acc", "c0"), "aten.add.Tensor"),
        Step("h", "mul", ("x", "w0"), "aten.mul.Tensor"),
        Step("xr", "round_bfloat16", ("x",)),
        Step("sq", "mul", ("xr", "xr")),
        Step("half", "mul", ("h", 0.5)),
    ),
    stores=(Store("out0", "x", "bfloat16"), Store("out1", "half", "float32")),
    reduces=(Reduce("part0", "sq"),),
)


def single(*steps: Step, **fields) -> EpilogueProgram:
    """A program that stores its last step."""
    last = steps[-1].name if steps else "acc"
    fields = {"stores": (Store("out0", last, "float64"),), **fields}
    return EpilogueProgram(("acc",), fields.pop("a_dtype", "float64"), steps=steps, **fields)


ILLEGAL = {
    "three accumulators": (replace(single(), accs=("a", "b", "c")), "accumulators must be"),
    "integer GEMM": (single(a_dtype="int32"), "'int32'"),
    "FP8 times 16 bits": (
        single(a_dtype="float8_e4m3fn", b_dtype="bfloat16"),
        "GEMM dtypes 'float8_e4m3fn' and 'bfloat16' differ: only those of FP8 may",
    ),
    "fast sums of 16 bits": (single(fast=True), "fast accumulation is for FP8 operands"),
    "an operand of FP8": (
        single(operands=(Operand("t", "tile", "float8_e4m3fn"),)),
        "'t': dtype 'float8_e4m3fn'",
    ),
    "nothing returned": (single(stores=()), "at least one store or reduction"),
    "operand kind": (single(operands=(Operand("t", "matrix", "float64"),)), "'t': kind 'matrix'"),
    "operand dtype": (single(operands=(Operand("t", "row", "int64"),)), "'t': dtype 'int64'"),
    "operand name": (single(operands=(Operand("a b", "row", "float64"),)), "'a b' is not a Python"),
    "keyword": (single(Step("lambda", "neg", ("acc",))), "'lambda' is not a Python identifier"),
    "reserved name": (single(Step("D", "neg", ("acc",))), "'D' is defined twice or reserved"),
    "two operands of one name": (
        single(operands=(Operand("t", "row", "float64"),) * 2),
        "operand 't' is defined twice",
    ),
    "unknown op": (single(Step("x", "softmax", ("acc",))), "'x': unknown op 'softmax'"),
    "arity": (single(Step("x", "add", ("acc",))), "'x': add takes 2 arguments, got 1"),
    "use before definition": (single(Step("x", "neg", ("y",))), "'x' reads 'y' before"),
    "not a number": (single(Step("x", "add", ("acc", math.nan))), "'x': literal nan"),
    "a bool literal": (single(Step("x", "add", ("acc", True))), "'x': literal True"),
    "where on a number": (
        single(Step("x", "where", ("acc", "acc", 0.0))),
        "'x': where argument 0 must be a bool, 'acc' is not",
    ),
    "arithmetic on a bool": (
        single(Step("b", "gt", ("acc", 0.0)), Step("x", "mul", ("acc", "b"))),
        "'x': mul argument 1 must be a number, 'b' is not",
    ),
    "logical op on a number": (
        single(Step("b", "gt", ("acc", 0.0)), Step("x", "logical_and", ("b", "acc"))),
        "'x': logical_and argument 1 must be a bool",
    ),
    "a bool is stored": (single(Step("b", "gt", ("acc", 0.0))), "'out0': 'b' is not a number"),
    "store dtype": (single(stores=(Store("out0", "acc", "int8"),)), "'out0': dtype 'int8'"),
    "two outputs of one name": (
        single(stores=(Store("out0", "acc", "float64"),), reduces=(Reduce("out0", "acc"),)),
        "output 'out0' is defined twice",
    ),
    "reduction axis": (single(reduces=(Reduce("p", "acc", "depth"),)), "'p': axis 'depth'"),
    "combine": (single(reduces=(Reduce("p", "acc", "row", "mul"),)), "'p': combine 'mul'"),
    "a pair reads a tile": (
        replace(
            single(operands=(Operand("t", "tile", "float64"),)),
            accs=("acc0", "acc1"),
            stores=(Store("out0", "acc0", "float64"),),
        ),
        "'t': a paired program reads no tiles",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_program_names_the_culprit(name):
    program, message = ILLEGAL[name]
    with pytest.raises(ProgramError) as caught:
        verify(program)
    assert message in str(caught.value)


def test_json_round_trip_keeps_everything():
    again = EpilogueProgram.from_json(RESIDUAL_NORM.to_json())
    assert again == RESIDUAL_NORM
    assert again.key == RESIDUAL_NORM.key


@pytest.mark.parametrize("literal", [math.inf, -math.inf, 1e-38, 0.1 + 0.2])
def test_json_keeps_every_literal(literal):
    program = single(Step("x", "maximum", ("acc", literal)))
    assert EpilogueProgram.from_json(program.to_json()).steps[0].args[1] == literal


def test_another_serialization_format_says_which_cache_to_clear():
    body = {**json.loads(RESIDUAL_NORM.to_json()), "format": 0}
    with pytest.raises(ProgramError, match="TORCHINDUCTOR_CACHE_DIR"):
        EpilogueProgram.from_json(json.dumps(body))


def test_key_ignores_where_a_step_came_from():
    steps = tuple(replace(step, origin="elsewhere") for step in RESIDUAL_NORM.steps)
    assert replace(RESIDUAL_NORM, steps=steps).key == RESIDUAL_NORM.key


COLUMN = (RESIDUAL_NORM.operands[0], Operand("w0", "col", "float32"))
NARROW = (RESIDUAL_NORM.operands[0], Operand("w0", "row", "float16"))
CHANGES = {
    "literal": lambda p: replace(p, steps=(*p.steps[:3], Step("half", "mul", ("h", 0.25)))),
    "op": lambda p: replace(p, steps=(Step("x", "sub", ("acc", "c0")), *p.steps[1:])),
    "GEMM dtype": lambda p: replace(p, a_dtype="float16", b_dtype="float16"),
    "dtype of B": lambda p: replace(p, b_dtype="float16"),
    "operand dtype": lambda p: replace(p, operands=NARROW),
    "operand kind": lambda p: replace(p, operands=COLUMN),
    "store dtype": lambda p: replace(p, stores=(Store("out0", "x", "float32"), p.stores[1])),
    "reduction": lambda p: replace(p, reduces=(Reduce("part0", "sq", "row", "max"),)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_key_changes_with_what_is_computed(what):
    assert CHANGES[what](RESIDUAL_NORM).key != RESIDUAL_NORM.key


def test_printed_program_reads_like_the_documentation():
    assert str(RESIDUAL_NORM).splitlines() == [
        "program(acc: bfloat16 x bfloat16)",
        "  load   c0      : tile bfloat16",
        "  load   w0      : row float32",
        "  x      = add acc c0                   # aten.add.Tensor",
        "  h      = mul x w0                     # aten.mul.Tensor",
        "  xr     = round_bfloat16 x",
        "  sq     = mul xr xr",
        "  half   = mul h 0.5",
        "  store  out0    = x : bfloat16",
        "  store  out1    = half : float32",
        "  reduce part0   = add over N of sq",
    ]


def nearest(x: torch.Tensor, digits: int, least: float = 0.0) -> torch.Tensor:
    """``x`` with so many binary digits, ties to even; ``least``: the smallest number above 0."""
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent - digits).clamp_min(least)
    return (x / step).round() * step


POSITIVE = {"sqrt", "rsqrt", "log", "log2", "log1p"}


def steps_for(op: str) -> list[Step]:
    """Steps that end in a number and contain ``op`` on the accumulator and the tile operand."""
    positive = [Step("p", "gt", ("acc", 0.0)), Step("q", "gt", ("t", 0.0))]
    as_number = Step("y", "where", ("b", 1.0, 0.0))
    if op in POSITIVE:
        return [Step("a", "abs", ("acc",)), Step("y", op, ("a",))]
    if op == "where":
        return [*positive, Step("y", "where", ("p", "acc", "t"))]
    if op.startswith("logical_"):
        return [*positive, Step("b", op, ("p", "q")[: OPS[op].arity]), as_number]
    args = ("acc", "t")[: OPS[op].arity]
    return [Step("b", op, args), as_number] if OPS[op].boolean else [Step("y", op, args)]


#: What is not an op of torch's by that name: digits, the smallest number above 0, the largest.
ROUNDED = {
    "round_bfloat16": (8, 0.0, math.inf),
    "round_float16": (11, 0.0, math.inf),
    "round_float8_e4m3fn": (4, 2.0**-9, 448),
    "round_float8_e5m2": (3, 2.0**-16, 57344),
}


def meaning(op: str, acc: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    if op in ROUNDED:
        digits, least, most = ROUNDED[op]
        return nearest(acc, digits, least).clamp(-most, most)
    if op == "where":
        return torch.where(acc > 0, acc, t)
    given = (acc > 0, t > 0) if op.startswith("logical_") else (acc, t)
    given = (acc.abs(),) if op in POSITIVE else given
    return getattr(torch, op)(*given[: OPS[op].arity]).double()


@pytest.mark.parametrize("op", OPS)
def test_reference_computes_what_the_op_means(op):
    program = verify(single(*steps_for(op), operands=(Operand("t", "tile", "float64"),)))
    a, b = randn(M, K), randn(K, N)
    t = randn(M, N)
    t[0] = (a @ b)[0]
    (result,) = reference.run(program, [a], [b], [t])
    torch.testing.assert_close(result, meaning(op, a @ b, t), rtol=1e-9, atol=1e-9)


def test_every_operand_broadcasts_to_a_full_tile_of_two_products():
    kinds = {"w": "row", "r": "col", "s": "scalar"}
    steps = (
        Step("v0", "mul", ("acc0", "r")),
        Step("v1", "sub", ("v0", "w")),
        Step("v2", "div", ("v1", "s")),
        Step("v3", "sub", ("v2", "acc1")),
    )
    program = verify(
        EpilogueProgram(
            ("acc0", "acc1"),
            "float64",
            tuple(Operand(name, kind, "float64") for name, kind in kinds.items()),
            steps,
            (Store("out0", "v3", "float64"), Store("out1", "s", "float64")),
        )
    )
    # Square, so that a row taken for a column would go unnoticed by the shapes alone.
    a, b0, b1, w, r = (randn(*shape) for shape in ((M, M), (M, M), (M, M), (M,), (M,)))
    s = torch.tensor(3.0).double()
    result, whole = reference.run(program, [a], [b0, b1], [w.repeat_interleave(2), r, s])
    torch.testing.assert_close(result, ((r.diag() @ a @ b0) - w[None, :]) / 3 - a @ b1)
    assert whole.is_contiguous()
    assert torch.equal(whole, torch.full((M, M), 3.0).double())
    assert program.paired
    assert not RESIDUAL_NORM.paired


@pytest.mark.parametrize("combine", ["add", "max"])
@pytest.mark.parametrize("axis", ["row", "col"])
def test_reductions_leave_one_partial_a_tile(axis, combine):
    program = verify(single(Step("x", "neg", ("acc",)), reduces=(Reduce("p", "x", axis, combine),)))
    a, b = randn(M, K), randn(K, N)
    _, partial = reference.run(program, [a], [b], [])
    dim = 1 if axis == "row" else 0
    want = -(a @ b)
    want = want.sum(dim, keepdim=True) if combine == "add" else want.max(dim, keepdim=True).values
    torch.testing.assert_close(partial, want)


def test_bfloat16_program_computes_in_float32_and_rounds_once():
    a, b = torch.randn(M, 64).bfloat16(), torch.randn(64, N).bfloat16()
    c, w = torch.randn(M, N).bfloat16(), torch.randn(N)
    x, h, squares = reference.run(RESIDUAL_NORM, [a], [b], [c, w])
    want = a.float() @ b.float() + c.float()
    assert (x.dtype, h.dtype, squares.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(x, want.bfloat16())
    torch.testing.assert_close(h, want * w * 0.5)
    torch.testing.assert_close(squares, want.bfloat16().float().pow(2).sum(1, keepdim=True))


def test_accumulators_are_not_rounded_unless_asked_for():
    program = single(a_dtype="bfloat16", stores=(Store("out0", "acc", "float32"),))
    a, b = torch.randn(M, 64).bfloat16(), torch.randn(64, N).bfloat16()
    (rounded,) = reference.run(program, [a], [b], [], exact=False)
    (exact,) = reference.run(program, [a], [b], [])
    assert torch.equal(rounded, (a @ b).float())
    torch.testing.assert_close(exact, a.float() @ b.float())
    assert not torch.equal(rounded, exact)


def test_output_shapes_count_ragged_tiles():
    program = single(reduces=(Reduce("p", "acc"), Reduce("q", "acc", "col")))
    assert reference.output_shapes(program, 130, 200, 128, 64) == [(130, 200), (130, 4), (2, 200)]
    assert reference.output_shapes(program, 130, 200) == [(130, 200), (130, 1), (1, 200)]
