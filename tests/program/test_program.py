# SPDX-License-Identifier: Apache-2.0
"""What a program is: legality, identity, text, and its meaning in plain torch."""

import json
from dataclasses import replace

import pytest
import torch
from checking import randn
from programs import E4M3, E5M2, one_op, parsed

from coda_inductor import EpilogueProgram, ProgramError
from coda_inductor.program import OPS, Step, consistent, reference, simplify, verify

M, N, K, HEAD = 5, 6, 7, 8


def program(steps="", operands="", stores=None, reduces="", dtype="float64", **more):
    last = steps.split(";")[-1].split()[0] if steps else "acc"
    return parsed(dtype, operands, steps, last if stores is None else stores, reduces, **more)


NORM = {
    "operands": "c0:tile:bfloat16 w0:row:float32",
    "steps": "x add acc c0; h mul x w0; xr round_bfloat16 x; sq mul xr xr; half mul h 0.5",
    "stores": "x half:float32",
    "reduces": "part0:sq",
    "dtype": "bfloat16",
}
ROTARY = {
    "operands": "t0:table t1:table",
    "steps": f"other swap acc {HEAD} 4; x mul acc t0; y mul other t1; z add x y",
    "head": HEAD,
}
GROUPS = "g:groups:int32"
#: As a projection of torchao's: both scales, then a statistic of what is stored.
SCALED = program(
    "x mul acc r; y mul x w; size abs y", "r:col:float32 w:row:float32", "y:bfloat16",
    "top:size:row:max left:size:col:max", E4M3, b_dtype=E5M2, fast=True,
)  # fmt: skip
SCALED = verify(simplify(consistent(SCALED)))


def swapped(*numbers: float, x: str = "acc", **more: str):
    steps = ROTARY["steps"].replace(f"acc {HEAD} 4", " ".join(map(str, (x, *numbers))))
    return program(**{**ROTARY, "steps": steps, **more})


ILLEGAL = [
    (program(accs=("a", "b", "c")), "accumulators must be"),
    (program(a_dtype="int32"), "'int32'"),
    (program(a_dtype=E4M3, b_dtype="bfloat16"),
     "GEMM dtypes 'float8_e4m3fn' and 'bfloat16' differ: only FP8 dtypes may"),
    (program(fast=True), "fast accumulation is for FP8 operands"),
    (program(operands=f"t:tile:{E4M3}"), "'t': dtype 'float8_e4m3fn'"),
    (program(stores=""), "at least one store or reduction"),
    (program(operands="t:matrix"), "'t': kind 'matrix'"),
    (program(operands="a-b:row"), "'a-b' is not a Python"),
    (program("D neg acc"), "'D' is defined twice or reserved"),
    (program(operands="t:row t:row"), "operand 't' is defined twice"),
    (program("x softmax acc"), "'x': unknown op 'softmax'"),
    (program("x add acc"), "'x': add takes 2 arguments, got 1"),
    (program("x neg y"), "'x' reads 'y' before"),
    (program("x add acc nan"), "'x': literal nan"),
    (replace(program(), steps=(Step("x", "add", ("acc", True)),)), "'x': literal True"),
    (program("x add 1 2"), "'x' has only literals: fold it"),
    (program("x where acc acc 0"), "'x': where argument 0 must be a bool, 'acc' is not"),
    (program("b gt acc 0; x mul acc b"), "'x': mul argument 1 must be a number, 'b' is not"),
    (program("b gt acc 0"), "'out0': 'b' is not a number"),
    (program(stores="acc:int8"), "'out0': dtype 'int8'"),
    (program(reduces="out0:acc"), "output 'out0' is defined twice"),
    (program(reduces="p:acc:depth"), "'p': axis 'depth'"),
    (program(reduces="p:acc:row:mul"), "'p': combine 'mul'"),
    (program(reduces="p:acc:col:logsumexp"), "'p': logsumexp is over N"),
    (program(operands="t:tile", stores="acc0", accs=("acc0", "acc1")),
     "'t': a paired program reads no tiles"),
    (program(**ROTARY | {"head": 0}), "heads of 0 columns in a program with 1 swaps, 2 tables"),
    (program(head=HEAD), "heads of 8 columns in a program with 0 swaps, 0 tables"),
    *((swapped(*numbers), "no pairs") for numbers in ((16, 8), (8, 3), (8, 0), (7.5, 1))),
    (swapped(8), "takes 3 arguments"),
    (swapped(8, 4, x="t0"), "no accumulator"),
    (program(**ROTARY, reduces="p:z"), "no sums"),
    (program(**ROTARY, a_dtype=E4M3), "of one accumulator, of 16 bits"),
    (program(stores="acc:bfloat16", reduces="p:acc:row:logsumexp"), "'p' reads an unrounded value"),
    (program(operands="i:index:int32"), "one 'groups', and at most one 'index'"),
    (program(operands=f"{GROUPS} s0:table"), "without heads, tables"),
    (program(operands=f"{GROUPS} s0:col:bfloat16"), "one value a row in 32 bits"),
    (program(operands=GROUPS, reduces="p:acc:col"), "no sums over M"),
    (program(operands=GROUPS, alternating=True), "columns alternate in grouped programs of two"),
    (program(operands="g:groups:int64"), "dtype 'int64' is not legal"),
]  # fmt: skip


@pytest.mark.parametrize(("illegal", "why"), ILLEGAL, ids=[why for _, why in ILLEGAL])
def test_an_illegal_program_names_the_culprit(illegal, why):
    with pytest.raises(ProgramError) as caught:
        verify(illegal)
    assert why in str(caught.value)


LITERALS = program(
    "a maximum acc inf; b maximum a -inf; c add b 1e-38; d add c 0.30000000000000004"
)


@pytest.mark.parametrize("original", [program(**NORM), program(**ROTARY), SCALED, LITERALS])
def test_json_keeps_everything(original):
    assert EpilogueProgram.from_json(original.to_json()) == original


def test_another_serialization_format_says_which_cache_to_clear():
    body = {**json.loads(SCALED.to_json()), "format": 0}
    with pytest.raises(ProgramError, match="TORCHINDUCTOR_CACHE_DIR"):
        EpilogueProgram.from_json(json.dumps(body))


def test_the_key_is_of_what_is_computed_wherever_a_step_came_from():
    """Shipped measurements are found by it: no release may change it."""
    assert program("x mul acc rstd", "rstd:col:float32", dtype="bfloat16").key == "6b42c26078914043"
    changes = [
        {}, {"steps": NORM["steps"].replace("0.5", "0.25")},
        {"steps": NORM["steps"].replace("add", "sub")}, {"a_dtype": "float16"},
        {"b_dtype": "float16"}, {"operands": NORM["operands"].replace("row", "col")},
        {"operands": NORM["operands"].replace("32", "16")}, {"stores": "x:float32 half:float32"},
        {"reduces": "part0:sq:row:max"},
    ]  # fmt: skip
    made = [program(**NORM | change) for change in changes]
    made += [SCALED, replace(SCALED, fast=False), replace(SCALED, b_dtype=E4M3)]
    made += [program(**ROTARY), replace(program(**ROTARY), head=16)]
    assert len({each.key for each in made}) == len(made)
    elsewhere = [replace(step, origin="elsewhere") for step in made[0].steps]
    assert replace(made[0], steps=tuple(elsewhere)).key == made[0].key


#: What is not an op of torch's by that name: its binary digits.
ROUNDED = {"round_bfloat16": 8, "round_float16": 11}


def nearest(x: torch.Tensor, digits: int) -> torch.Tensor:
    """``x`` with so many binary digits, ties to even."""
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent - digits)
    return (x / step).round() * step


@pytest.mark.parametrize("op", OPS)
def test_an_op_means_torchs_of_its_name(op):
    made = verify(one_op(op, "float64"))
    a, b, t = randn(M, K), randn(K, N), randn(M, N)
    acc = a @ b
    t[0] = acc[0]
    values = {"acc": acc, "other": t, "positive": acc.abs() + 0.5, "small": acc.clamp_min(-4)}
    values |= {"p": acc < 0, "q": t > 0}
    args = [values[arg] for arg in next(step.args for step in made.steps if step.name == "v")]
    want = nearest(*args, ROUNDED[op]) if op in ROUNDED else getattr(torch, op)(*args)
    want = torch.where(want, acc, t) if OPS[op].boolean else want
    torch.testing.assert_close(reference.run(made, [a], [b], [t])[0], want, rtol=1e-9, atol=1e-9)


def test_inductor_keeps_a_rounding_step():
    """It drops a cast down and up."""
    dtypes = torch.bfloat16, torch.float16
    steps = [OPS[f"round_{str(dtype).removeprefix('torch.')}"].torch for dtype in dtypes]
    x = torch.randn(64, 33) * torch.logspace(-9, 6, 33)
    x[1, :4] = torch.tensor([65519.0, 65520.0, 1 + 2**-11, 1 + 2**-8])  # ties, and the largest
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    expected = [x.to(dtype).float() for dtype in dtypes]

    def function(x):
        return [step(x * 1.0) for step in steps]

    for call in (function, torch.compile(function, backend="inductor")):
        torch.testing.assert_close(call(x), expected, rtol=0, atol=0, equal_nan=True)


def test_every_operand_broadcasts_to_a_full_tile_of_two_products():
    made = verify(program(
        "v0 mul acc0 r; v1 sub v0 w; v2 div v1 s; v3 sub v2 acc1", "w:row r:col s:scalar", "v3 s",
        accs=("acc0", "acc1"),
    ))  # fmt: skip
    # Square, so that a row taken for a column would go unnoticed by the shapes alone.
    a, b0, b1, w, r = (randn(*shape) for shape in ((M, M), (M, M), (M, M), (M,), (M,)))
    s = torch.tensor(3.0).double()
    result, whole = reference.run(made, [a], [b0, b1], [w.repeat_interleave(2), r, s])
    torch.testing.assert_close(result, ((r.diag() @ a @ b0) - w[None, :]) / 3 - a @ b1)
    assert torch.equal(whole, torch.full((M, M), 3.0).double())


def test_reductions_leave_one_partial_a_tile():
    made = verify(program(
        "x neg acc", reduces="p:x q:x:row:max r:x:col s:x:col:max t:x:row:logsumexp"
    ))  # fmt: skip
    a, b = randn(M, K), randn(K, N)
    x, *partials = reference.run(made, [a], [b], [])
    assert torch.equal(x, -(a @ b))
    want = [x.sum(1, True), x.amax(1, True), x.sum(0, True), x.amax(0, True)]
    for have, wanted in zip(partials, [*want, x.logsumexp(1, True)], strict=True):
        torch.testing.assert_close(have, wanted)
    shapes = reference.output_shapes(made, 130, 200, 128, 64)
    assert shapes == [(130, 200), (130, 4), (130, 4), (2, 200), (2, 200), (130, 4)]
    assert reference.output_shapes(made, 130, 200)[1::2] == [(130, 1), (1, 200), (130, 1)]


def test_bfloat16_program_computes_in_float32_and_rounds_once():
    a, b = torch.randn(M, 64).bfloat16(), torch.randn(64, N).bfloat16()
    c, w = torch.randn(M, N).bfloat16(), torch.randn(N)
    x, h, squares = reference.run(verify(program(**NORM)), [a], [b], [c, w])
    want = a.float() @ b.float() + c.float()
    assert (x.dtype, h.dtype, squares.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(x, want.bfloat16())
    torch.testing.assert_close(h, want * w * 0.5)
    torch.testing.assert_close(squares, want.bfloat16().float().pow(2).sum(1, keepdim=True))


def factors(a_dtype: str, *b_dtypes: str):
    """A (24, 48), and b (48, 32) of each dtype."""
    bs = [torch.randn(32, 48).to(getattr(torch, dtype)).t() for dtype in b_dtypes]
    return torch.randn(24, 48).to(getattr(torch, a_dtype)), *bs


@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_products_are_not_rounded_unless_asked_for(dtype):
    """Then to bfloat16, also of FP8."""
    made, (a, b) = program(dtype=dtype, stores="acc:float32"), factors(dtype, dtype)
    (rounded,) = reference.run(made, [a], [b], [], exact=False)
    (exact,) = reference.run(made, [a], [b], [])
    torch.testing.assert_close(exact, a.float() @ b.float())
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)


def test_an_unfused_product_and_its_bias_are_rounded_once():
    """As ``addmm`` does: two roundings doubled the error of a loss's gradients."""
    (a, b), w = factors("bfloat16", "bfloat16"), torch.randn(32).bfloat16()
    made = program("y add acc w", "w:row:bfloat16", "y:bfloat16", dtype="bfloat16")
    (y,) = reference.run(made, [a], [b], [w], exact=False)
    assert torch.equal(y, torch.addmm(w, a, b))
    twice = program("y add acc w; z mul y acc", "w:row:bfloat16", "z:bfloat16", dtype="bfloat16")
    (z,) = reference.run(twice, [a], [b], [w], exact=False)
    product = (a @ b).float()
    assert torch.equal(z, ((product + w) * product).bfloat16())


def test_a_float32_sum_is_rounded_as_its_origin_rounds():
    """A step's origin tells ``addmm`` from a product and a sum: the gradient of a tied weight with
    one row had other bits under ``numerics="eager"``."""
    a, b, w = torch.randn(32, 1).t(), torch.randn(32, 16), torch.randn(16)
    summed = program("y add acc w", "w:row:float32", "y:float32", dtype="float32")
    step = replace(summed.steps[0], origin="aten.addmm (bias)")
    for made, want in ((summed, a @ b + w), (replace(summed, steps=(step,)), torch.addmm(w, a, b))):
        (y,) = reference.run(made, [a], [b], [w], exact=False)
        assert torch.equal(y, want)


def test_an_unfused_fp8_product_is_rounded_behind_its_scales():
    (a, b), r, w = factors(E4M3, E5M2), torch.rand(24) + 0.5, torch.rand(32) + 0.5
    y, top, _ = reference.run(SCALED, [a], [b], [r, w], exact=False)
    want = ((a.float() @ b.float()) * r[:, None] * w).bfloat16()
    assert torch.equal(y, want)
    assert torch.equal(top, want.float().abs().amax(1, keepdim=True))


def test_each_product_of_a_pair_has_scales_of_its_own():
    made = verify(program(
        "g0 mul acc0 r; g mul g0 wg; u0 mul acc1 r; u mul u0 wu; y mul g u",
        "r:col:float32 wg:row:float32 wu:row:float32", "y:float32", dtype=E4M3,
        accs=("acc0", "acc1"),
    ))  # fmt: skip
    a, *bs = factors(E4M3, E4M3, E4M3)
    r, *ws = torch.rand(24), torch.rand(32), torch.rand(32)
    given = [r, *(w.repeat_interleave(2) for w in ws)]
    g, u = ((a.float() @ b.float()) * r[:, None] * w for b, w in zip(bs, ws, strict=True))
    torch.testing.assert_close(reference.run(made, [a], bs, given)[0], g * u)
    (rounded,) = reference.run(made, [a], bs, given, exact=False)
    assert torch.equal(rounded, g.bfloat16().float() * u.bfloat16().float())


def test_alternating_columns():
    made = verify(program("y mul acc0 acc1", GROUPS, accs=("acc0", "acc1"), alternating=True))
    a, b, groups = randn(5, 16), randn(2, 16, 48), torch.tensor([0, 2, 5], dtype=torch.int32)
    z = torch.cat([a[:2] @ b[0], a[2:] @ b[1]])
    torch.testing.assert_close(reference.run(made, [a], [b], [groups])[0], z[:, ::2] * z[:, 1::2])
    assert EpilogueProgram.from_json(made.to_json()) == made
    assert replace(made, alternating=False).key != made.key


def test_a_row_of_each_group():
    """A group may have no row, and what is in none has any."""
    operands = f"{GROUPS} w:row:float32"
    made = verify(program("x add acc0 w; y mul x acc1", operands, "y:float32", dtype="float32",
                          accs=("acc0", "acc1")))  # fmt: skip
    a, w, bs = torch.randn(6, 16), torch.randn(3, 24), [torch.randn(3, 16, 24) for _ in range(2)]
    groups, own = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([0, 0, 2, 2, 2])
    products = [torch.stack([a[i] @ b[e] for i, e in enumerate(own)]) for b in bs]
    (y,) = reference.run(made, [a], bs, [groups, w.repeat_interleave(2, 1)])
    torch.testing.assert_close(y[:5], (products[0] + w[own]) * products[1])


def test_rotary_is_hugging_faces():
    a, b = randn(3, K), randn(K, 3 * HEAD)
    cos, sin = randn(2, 3, HEAD)
    signed = sin * torch.cat((-torch.ones(4), torch.ones(4)))
    (got,) = reference.run(verify(program(**ROTARY)), [a], [b], [cos, signed])
    x = (a @ b).unflatten(-1, (-1, HEAD))
    half = torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), -1)
    torch.testing.assert_close(got, (x * cos[:, None] + half * sin[:, None]).flatten(-2))
