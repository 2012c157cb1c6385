# SPDX-License-Identifier: Apache-2.0
"""Statistics are of what is stored: reductions read a stored value as memory holds it; and programs
are simplified: equal steps become one, a spelled logistic function a sigmoid."""

import functools

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from harness import Harness
from programs import parsed
from torch import nn

from coda_inductor.errors import ProgramError
from coda_inductor.program import EpilogueProgram, consistent, reference, simplify, verify

M, N, K = 24, 40, 16
program = functools.partial(parsed, "bfloat16", "t:tile")
HEAD = program("", "acc", "lse:acc:row:logsumexp")
NORM = program("x add acc t; sq mul x x; h mul x 2", "x h", "part0:sq part1:h")


@pytest.mark.parametrize("original", [HEAD, NORM], ids=["head", "norm"])
def test_an_unrounded_statistic_is_refused_and_made_consistent(original):
    with pytest.raises(ProgramError, match="stored rounded"):
        verify(original)
    made = verify(simplify(consistent(original)))
    assert consistent(made) == made
    assert made.stores == original.stores
    a, b = (randn(*shape, dtype=torch.bfloat16) for shape in ((M, K), (K, N)))
    outputs = reference.run(made, [a], [b], [randn(M, N, dtype=torch.bfloat16)])
    x = outputs[0].float()
    if original is HEAD:
        assert torch.equal(outputs[1], x.logsumexp(1, keepdim=True))
    else:  # the second is of h, which is stored itself
        assert torch.equal(outputs[2], x.square().sum(1, keepdim=True))
        assert torch.equal(outputs[3], outputs[1].float().sum(1, keepdim=True))


def test_gradients_of_biases_stay_more_exact_than_the_tile():
    """Nothing combines them with a tile again."""
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).bfloat16()
    x = randn(M, K, dtype=torch.bfloat16).requires_grad_()
    harness = check_gradients(model, x, tolerance=3e-2)
    programs = [site.program for site in harness.fused]
    columns = [p for p in programs if any(r.axis == "col" for r in p.reduces)]
    assert columns
    assert not any(s.op.startswith("round") for p in columns for s in p.steps)


def test_the_largest_of_a_row_is_one_of_those_that_are_stored():
    """Its gradient compares them. The product is stored too, rounded, for the gain's gradient."""

    def function(x, w, gain):
        with torch.autocast("cpu", torch.bfloat16):
            y = x + F.linear(x, w) * gain
            return y, y.amax(-1)

    shapes = (M, K), (K, K), (K,)
    x, w, gain = (randn(*shape, dtype=torch.float32).requires_grad_() for shape in shapes)
    compiled = torch.compile(function, backend=Harness(reference=True))
    y, most = compiled(x, w, gain)
    assert torch.equal(most, y.amax(-1))
    (gradient,) = torch.autograd.grad(most.sum(), x)
    assert gradient.isfinite().all()


def test_a_sum_over_rows_that_meets_its_tile_again_is_of_what_is_stored():
    def function(x, w):
        y = F.linear(x, w)
        return y.float() - y.float().sum(0) / M, y

    x, w = torch.ones(M, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16)
    harness = check(function, x, w, tolerance=1e-6)  # rows are equal: every difference is zero
    (site,) = harness.fused
    assert any(s.op == "round_bfloat16" for s in site.program.steps)


def test_what_is_stored_is_what_inductor_lets_others_read():
    """It drops the cast of a store down, and that of its reader up."""
    top = verify(consistent(program("x mul acc 1.1; h mul x 2", "x h", "part:x:row:max")))

    def differences(a, b, t):
        x, _, largest = reference.run(top, [a], [b], [t], exact=False)
        return (x.float() - largest).amax(1)

    args = [randn(*shape, dtype=torch.bfloat16) for shape in ((M, K), (K, N), (M, N))]
    for call in (differences, torch.compile(differences, backend="inductor")):
        assert torch.equal(call(*args), torch.zeros(M))


def test_no_store_shares_memory():
    made = verify(parsed("float64", "t:tile", "", "acc acc t"))
    a, b, t = (randn(*shape) for shape in ((M, K), (K, N), (M, N)))
    tensors = [*reference.run(made, [a], [b], [t]), a, b, t]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)


def of_tiles(steps: str, stores: str, reduces: str = "") -> EpilogueProgram:
    return verify(parsed("float64", "t:tile u:tile", steps, stores, reduces))


def run(chosen: EpilogueProgram) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b, t, u = (torch.randn(6, 6, dtype=torch.float64, generator=generator) for _ in range(4))
    return reference.run(chosen, [a], [b], [t, u])


def test_equal_steps_become_the_first_of_them_to_any_depth():
    long = of_tiles(
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


@pytest.mark.parametrize(("tail", "ops"), [
    ("y div t d", "sigmoid mul"),
    ("y div 1 d", "sigmoid"),
    ("s reciprocal d; y div s d", "sigmoid mul"),
    ("z div t d; y add z d", "neg exp add sigmoid mul add"),  # the denominator is read again
])  # fmt: skip
def test_a_spelled_logistic_function_is_a_sigmoid(tail, ops):
    long = of_tiles(f"unused exp acc; n neg t; e exp n; d add e 1; {tail}", "y")
    short = verify(simplify(long))
    assert [step.op for step in short.steps] == ops.split()
    torch.testing.assert_close(run(short), run(long))


@pytest.mark.parametrize("steps", [
    "n neg t; e exp n; d add e 2; y div t d",
    "n neg t; e exp t; d add e 1; y div n d",
    "n neg t; e exp n; d sub 1 e; y div t d",
    "n neg t; e exp n; d add e 1; y div d t",
    "x sub t u; z sub u t; y add x z",
    "x mul t 2; z mul t 2.5; y add x z",
    "x add t 0; z add t -0.0; y add x z",
    "less lt t u; x where less t u; z where less u t; y add x z",
])  # fmt: skip
def test_what_only_looks_equal_or_like_a_logistic_function_stays(steps):
    chosen = of_tiles(steps, "y")
    assert simplify(chosen) == chosen


def test_commutative_ops_are_equal_in_either_order():
    chosen = of_tiles("x maximum t 2; y maximum 2 t", "x y")
    assert [store.value for store in simplify(chosen).stores] == ["x", "x"]
