# SPDX-License-Identifier: Apache-2.0
"""``options={"numerics": "eager"}``: the bits of eager where products have them, in 16 bits.

On a CPU a fused site computes its product by the same ``mm`` as eager, so that whole results and
gradients are compared. ``tests/gpu/test_gpu_exact.py`` asks it of the kernels.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import differentiate, randn
from harness import Harness
from torch import nn
from zoo.layers import Block, Everything, Gated, Lora, T, V, rotated

from coda_inductor import pipeline

D, ROWS = 64, 64


class NormLinear(nn.Module):
    """A linear layer behind the norm of a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.o, self.q = nn.RMSNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.q(self.norm(x + self.o(x)))


def plain_gate(gate, up):
    return F.relu(gate) - up


MODELS = {
    "residual": lambda: Gated(
        D, 2 * D, gate=plain_gate, norm=lambda _: nn.Identity(), front=True, bias=True
    ).half(),
    "adapter": lambda: nn.Sequential(Lora(nn.Linear(D, D), 8, 0.3), nn.ReLU()).bfloat16(),
    "Llama block": lambda: Block(D, turn=rotated).bfloat16(),
}


def results(model, x, call=lambda model, x: model(x)):
    model, x = copy.deepcopy((model, x))
    y = call(model, x)
    return [y, *differentiate(y, (model, (x,)))]


def differing(left, right) -> int:
    """How many numbers have other bits."""
    assert len(left) == len(right)
    return sum(int((a != b).sum()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_results_and_gradients_have_eagers_bits(make):
    model = make().requires_grad_()
    dtype = next(model.parameters()).dtype
    x = randn(4, ROWS // 4, D).to(dtype).requires_grad_()
    want, harness, other = results(model, x), Harness(numerics="eager"), Harness()
    assert differing(results(model, x, harness.train), want) == 0
    assert differing(results(model, x, other.train), want) > 0
    assert len(harness.fused) >= 2
    assert harness.counts.keys() <= {"residual", "epilogue"}


def gate(x, tile, w1, w2, bias):
    return F.relu(F.linear(x, w1, bias)) * F.linear(x, w2) * 0.3


def residual(x, tile, w1, w2, bias):
    return tile + (F.linear(x, w1, bias) * 0.3 - tile) * tile


def adapter(x, tile, w1, w2, bias):
    base = F.linear(x, w1, bias)
    return base + F.linear(F.linear(x, w2[:16]), w2[:, :16]) * 0.3


EXACT = pytest.mark.parametrize("function", [gate, residual, adapter])


def small_integers(device="cpu", rows=264, width=256, hidden=640):
    """Arguments of the functions above with which each product is exact, in any order of sums."""
    torch.manual_seed(0)
    shapes = (rows, width), (hidden, width), (hidden, width), (hidden,)
    x, w1, w2, bias = (torch.randint(-2, 3, s, device=device).bfloat16() for s in shapes)
    return x, torch.randn(rows, hidden, device=device).bfloat16(), w1, w2, bias


@EXACT
def test_programs_round_what_kernels_accumulate(function):
    arguments = small_integers()
    harness = Harness(numerics="eager", reference=True)
    want = function(*arguments)
    assert torch.equal(harness.run(function, *arguments), want)
    assert harness.fused
    assert not torch.equal(Harness(reference=True).run(function, *arguments), want)


def test_numbers_are_compared_as_eager_compares_them():
    """-0.3 in bfloat16 is less than -0.3, but eager rounds both. At the limit torch 2.13 passes a
    gradient on, torch 2.15 does not."""
    clamped = lambda x, w: (x @ w).clamp(-0.3, 0.7)  # noqa: E731
    x, w = torch.eye(8).bfloat16(), torch.full((8, 8), -0.3).bfloat16().requires_grad_()
    y = Harness(numerics="eager", gate="always").train(clamped, x, w)
    have, want = (torch.autograd.grad(z.sum(), [w])[0] for z in (y, clamped(x, w)))
    assert torch.equal(have, want)


def test_powers_round_each_product():
    x, w = randn(ROWS, D).bfloat16(), randn(D, D).bfloat16()
    harness = Harness(numerics="eager", gate="always")
    have = harness.run(lambda x, w: ((x @ w) ** 3, (x @ w).float() ** 3), x, w)
    assert differing(have, ((x @ w) ** 3, (x @ w).float() ** 3)) == 0
    assert len(harness.fused) == 2


def test_a_product_under_a_factor_for_each_row_is_summed_as_eagers():
    """A sum in float32 ends on another side of a rounding for a few of so many numbers."""
    tensors = [randn(*shape).bfloat16() for shape in ((512, 300), (300, 512), (512, 1))]
    harness, function = Harness(numerics="eager", gate="always"), lambda x, w, row: (x @ w) * row
    assert differing([harness.run(function, *tensors)], [function(*tensors)]) == 0
    assert len(harness.fused) == 1


@pytest.mark.parametrize("bias", [(D,), (1,), (ROWS, 1), (ROWS, D)], ids=str)
def test_a_bias_of_any_shape_is_added_before_its_product_is_rounded(bias):
    """A head with one output has one number as its bias."""
    tensors = [randn(*shape).bfloat16() for shape in (bias, (ROWS, D), (D, D))]
    harness, function = Harness(numerics="eager", gate="always"), lambda *t: torch.addmm(*t).relu()
    assert differing([harness.run(function, *tensors)], [function(*tensors)]) == 0
    assert len(harness.fused) == 1


def test_the_largest_of_a_row_is_of_the_float32_sum():
    """As in eager; the next product reads a rounded copy."""

    def function(x, w, stream):
        with torch.autocast("cpu", torch.bfloat16):
            y = stream + F.linear(x, w)
            return y.amax(-1), F.linear(y, w)

    tensors = [randn(*shape, dtype=torch.float32) for shape in ((ROWS, D), (D, D), (ROWS, D))]
    harness = Harness(numerics="eager", gate="always")
    assert differing(harness.run(function, *tensors), function(*tensors)) == 0
    (site,) = harness.fused
    assert [reduce.combine for reduce in site.program.reduces] == ["max"]
    assert [store.dtype for store in site.program.stores] == ["bfloat16"]


def test_sums_of_rows_stay_outside_of_epilogues():
    harness = Harness(numerics="eager")
    harness.train(NormLinear().bfloat16(), randn(ROWS, D).bfloat16())
    assert "eager-numerics" in {stop.code for site in harness.fused for stop in site.stops}


def test_only_passes_that_keep_all_bits_run():
    tokens, harness = torch.randint(V, (2, T)), Harness(numerics="eager")
    harness.train(Everything().bfloat16(), tokens, tokens)[0].backward()
    allowed = {p.name for p in (*pipeline.ON_DYNAMO, *pipeline.ON_ATEN) if p.eager}
    assert "fuse" in harness.record.changed.keys() <= allowed
    assert not {"packed", "idioms", "attention", "norm"} & allowed


def test_inductors_own_kernels_round_too():
    model, x = NormLinear().bfloat16(), randn(ROWS, D).bfloat16()
    with torch.no_grad():
        want = model(x)
        compiled = torch.compile(model, backend="coda", options={"numerics": "eager"})
        assert torch.equal(compiled(x), want)
