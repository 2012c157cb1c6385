# SPDX-License-Identifier: Apache-2.0
"""``options={"fp8": RECIPE}``: an unmodified model computes what torchao makes of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import Harness
from torch import nn
from zoo.float8 import (
    HIDDEN,
    RECIPES,
    D,
    Eager,
    Raised,
    Stack,
    assert_bits,
    batch,
    convert,
    hard,
    needs_scaled_mm,
    stack,
    trained,
)
from zoo.layers import Gated

from coda_inductor.dynamo.fp8_linears import skips
from coda_inductor.report import forget, reports

#: So that nothing else than FP8 is rewritten, and results can be compared bit for bit.
PLAIN = {"disable": ["idioms", "fuse"], "fp8_small": True}


def plain(dtype=torch.bfloat16, **kwargs) -> nn.Module:
    """The model that ``stack`` converts."""
    needs_scaled_mm()
    torch.manual_seed(0)
    return Stack(**kwargs).to(dtype)


CASES = [*((recipe, "") for recipe in RECIPES), ("rowwise", "checkpoint"), ("tensorwise", "bias")]


@pytest.mark.parametrize(("recipe", "how"), CASES)
def test_numbers_are_torchaos_bit_for_bit(recipe, how):
    kwargs = {"bias": how == "bias", "checkpointed": how == "checkpoint"}
    ours = trained(Harness(fp8=recipe, **PLAIN), plain(**kwargs), hard())
    assert_bits(ours, trained(Eager(), stack(recipe, **kwargs), hard()))


def one_shared():
    model = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight
    return model


class Turned(nn.Module):
    """Two layers, the second of which reads the first one's columns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, 48, bias=False), nn.Linear(32, 64)

    def forward(self, x):
        return self.second(self.first(x.flatten(0, 1)).t())


BESIDE = {
    "skipped": (Stack, ["gate"], ["tensorwise"]),  # up has its input and its widths
    "shared": (one_shared, ["1"], ["rowwise"]),
    "turned": (Turned, [], ["rowwise", "rowwise_with_gw_hp"]),
}


@pytest.mark.parametrize(("name", "recipe"), [(n, r) for n in BESIDE for r in BESIDE[n][2]])
def test_gradients_are_those_of_the_layers_that_were_chosen(name, recipe):
    """Whatever lies beside them, or in front."""
    make, skip, _ = BESIDE[name]
    needs_scaled_mm()
    torch.manual_seed(0)
    model = make().bfloat16()
    theirs = convert(copy.deepcopy(model), recipe, lambda _, path: path.split(".")[-1] not in skip)
    want = trained(Eager(), theirs, batch())
    have = trained(Harness(fp8=recipe, fp8_skip=skip, **PLAIN), model, batch())
    assert_bits(have, want)


def test_under_autocast_it_is_as_exact_as_torchao():
    """Which quantizes float32 weights there, while ours are those that autocast has rounded."""
    x, recipe = batch(torch.float32), "rowwise"
    with torch.autocast("cpu", torch.bfloat16):
        ours = trained(Harness(fp8=recipe, **PLAIN), plain(torch.float32, layers=2), x)
        theirs = trained(Eager(), stack(recipe, torch.float32, layers=2), x)
    exact = trained(Eager(), plain(torch.float64, layers=2), x.double())
    for have, other, want in zip(ours, theirs, exact, strict=True):
        error, reference = ((y.double() - want).norm() for y in (have, other))
        assert error <= 1.1 * reference


class Two(nn.Module):
    """Two layers, and a product of two inputs, which is none."""

    def __init__(self, n: int = 32):
        super().__init__()
        self.first, self.lm_head = nn.Linear(D, n, bias=False), nn.Linear(n, 48, bias=False)

    def forward(self, x):
        y = self.first(x)
        return self.lm_head(y) @ torch.ones(48, 48, dtype=y.dtype)


def computed():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
    return nn.Sequential(layer, nn.Linear(D, D))


class Transformed(nn.Module):
    """A layer that torch.func calls."""

    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(D, D), call

    def forward(self, x):
        return self.call(self.layer, x)


SMALL = {"fp8_small": True}
#: Code -> (options, model, dtype, what stays, products in FP8).
REFUSED = {
    "fp8-skipped": (SMALL, Two, torch.bfloat16, "lm_head", 3),
    "fp8-small": ({}, Two, torch.bfloat16, "first", 0),
    "not-multiple-of-16": ({**SMALL, "fp8_skip": []}, lambda: Two(40), torch.bfloat16, "first", 0),
    "fp8-dtype": (SMALL, Two, torch.float32, "first", 0),
    "fp8-computed": (SMALL, computed, torch.bfloat16, "0", 3),
    "not-recorded": (
        SMALL, lambda: Transformed(lambda layer, x: torch.func.vmap(layer)(x)), torch.bfloat16,
        "layer", 0,
    ),
    "forward-mode": (
        SMALL, lambda: Transformed(lambda layer, x: torch.func.jvp(layer, (x,), (x,))[1]),
        torch.bfloat16, "layer", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSED)
def test_what_stays_says_why(code):
    needs_scaled_mm()
    options, make, dtype, where, count = REFUSED[code]
    harness = Raised(fp8="rowwise", **options)
    harness.train(make().to(dtype), batch(dtype).requires_grad_())
    assert harness.ops()["coda_inductor.scaled_mm.default"] == count
    refusals = harness.record.report.refusals
    assert (code, where) in {(why.code, why.where or "") for why in refusals}


def test_disabled():
    harness = Raised(fp8="rowwise", fp8_small=True, disable=["fp8_linear"])
    harness.train(plain(), batch().requires_grad_())
    assert harness.ops()["coda_inductor.scaled_mm.default"] == 0


def test_a_gradient_over_odd_rows_stays():
    harness = Raised(fp8="rowwise", **PLAIN)
    harness.train(plain(), batch(rows=(1, 24)).requires_grad_())
    assert harness.ops()["coda_inductor.scaled_mm.default"] == 2 * 3
    assert {why.code for why in harness.record.report.refusals} == {"not-multiple-of-16"}
    assert "its weight's gradient: M=24" in harness.record.report.refusals[0].text


def test_no_rows_have_no_maximum():
    """An expert that no token chose: in bfloat16 it runs, and so it does in FP8."""
    harness = Harness(fp8="tensorwise", reference=True, gate="always", fp8_small=True)
    y, *gradients = trained(harness, plain(), batch(rows=(0,)))
    assert y.shape == (0, D)
    assert all(not gradient.any() for gradient in gradients)
    stays = [why.code for why in harness.report.refusals if why.what == "fp8_linear"]
    assert stays == 3 * ["empty"]


class Chosen(nn.Module):
    """A layer of the rows that data chooses; with ``some``, the model says that there are such."""

    def __init__(self, some: bool):
        super().__init__()
        self.expert, self.some = nn.Linear(D, 32), some

    def forward(self, x):
        rows = x[(x[:, 0] > 0).nonzero().squeeze(1)]
        if self.some:
            torch._check(rows.shape[0] > 0)
        return self.expert(rows)


@pytest.mark.parametrize(
    ("recipe", "some", "codes"),
    [("tensorwise", False, {"fp8-rows"}), ("tensorwise", True, set()), ("rowwise", False, set())],
)
def test_rows_that_may_be_none(recipe, some, codes):
    x = batch(rows=(32,))
    x[:, 0] = -1 + 2 * some
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        harness = Raised(fp8=recipe, **PLAIN)
        y = harness.run(Chosen(some).bfloat16(), x)
    assert y.shape == (32 * some, 32)
    assert {why.code for why in harness.report.refusals} == codes
    assert harness.ops()["coda_inductor.scaled_mm.default"] == int(not codes)


class Scores(nn.Module):
    """A layer, and products with what the caller, or the graph in front of a break, hands over."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(D, D), nn.Parameter(torch.randn(32, D))

    def forward(self, x, others):
        y = self.layer(x)
        return F.linear(y, self.own.to(y.dtype)), F.linear(y, others), y @ others.t()


def test_what_is_handed_over_is_no_weight():
    needs_scaled_mm()
    harness = Raised(fp8="rowwise", **PLAIN)
    rows = batch(rows=(32,)).requires_grad_()
    harness.train(Scores().bfloat16(), rows, rows.detach().requires_grad_())
    assert harness.counts["fp8_linear"] == 2
    assert not [why for why in harness.report.refusals if why.what == "fp8_linear"]
    assert harness.ops()["coda_inductor.scaled_mm.default"] == 2 * 3
    assert harness.ops()["aten.mm.default"] == 2 * 3


class Region(Gated):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return super().forward(x)


def test_a_region_is_said_once(without_code):
    needs_scaled_mm()
    forget()
    model = nn.Sequential(*(Region(D, HIDDEN) for _ in range(2))).bfloat16()  # which share one body
    options = {"fp8": "rowwise", "fp8_small": True, "fp8_skip": "0.gate", "disable": ["fuse"]}
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch._dynamo.reset()
        x = batch().requires_grad_()
        torch.compile(model, backend="coda", options=options)(x).sum().backward()
    (report,) = reports()
    stays = [(why.code, why.where) for why in report.refusals if why.what == "fp8_linear"]
    assert stays == [("fp8-skipped", "0.gate")]


NAMED = {
    "lm_head": (
        "lm_head", "model.lm_head", "base_model.model.lm_head.base_layer",
        "base_model.model.lm_head.modules_to_save.default",
    ),
    "lm_head.base_layer": ("base_model.model.lm_head.base_layer",),
    "layers.0.mlp.up": ("module.model.layers.0.mlp.up",),
    "layers.0.*": ("model.layers.0.mlp.up",),
}  # fmt: skip
NOT_NAMED = {
    "layers.0.*": "model.layers.10.mlp.up", "head": "lm_head",
    "output": "encoder.layer.0.output.dense",  # BERT's are no heads
    "q_proj": "layers.0.q_proj.lora_A.default",
}  # fmt: skip


def test_what_a_pattern_names():
    for pattern, paths in NAMED.items():
        assert all(skips(pattern, path) for path in paths)
    assert not any(skips(pattern, path) for pattern, path in NOT_NAMED.items())


def test_the_report_has_each_layer_that_a_pattern_names():
    given = ["gate", "layers.0.*", "lm_hed"]
    harness = Raised(fp8="rowwise", fp8_skip=given, **PLAIN)
    harness.train(plain(layers=2), batch().requires_grad_())
    kept = [why.where for why in harness.report.refusals if why.code == "fp8-skipped"]
    assert kept == ["layers.0.gate", "layers.0.up", "layers.0.down", "layers.1.gate"]
    assert harness.counts["fp8_linear"] == 2


@pytest.mark.parametrize(
    ("wide", "dtype", "options", "says"),
    [
        (4096, torch.float32, {}, "torch.float32, not bfloat16. options['fp8'] is for bfloat16"),
        (64, torch.bfloat16, {}, "too small to gain from rowwise. options['fp8_small'] = True"),
        (64, torch.bfloat16, {"fp8_small": True}, ""),
        (64, torch.bfloat16, {"fp8_skip": ["*"]}, ""),
    ],
)
def test_a_graph_of_which_no_layer_is_converted_is_one_warning(wide, dtype, options, says, warned):
    """It was silent. Layers that the user names are no reason for one."""
    model = nn.Sequential(nn.Linear(wide, 64), nn.GELU(), nn.Linear(64, wide)).to(dtype)
    x = torch.ones(32, wide, dtype=dtype)
    for _ in range(2):
        Harness(fp8="rowwise", disable=["fuse"], **options).train(model, x)
        torch._dynamo.reset()
    told = [text for text in warned() if "options['fp8']" in text]
    assert len(told) == bool(says)
    if says:
        assert "(first of 2 layers: 0)" in told[0]
        assert says in told[0]
