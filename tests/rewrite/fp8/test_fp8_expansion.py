# SPDX-License-Identifier: Apache-2.0
"""Quantizations become maxima in epilogues and one cast a tensor; scaled products fuse as others.

What is rounded differs from torchao's own run (a product is not rounded before its epilogue, a norm
is not rounded before it is quantized), so that results agree in float64 where nothing is rounded at
all, and else in their error against float32.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from float8 import (
    Packed,
    Stack,
    assert_exact,
    batch,
    convert,
    each_with_some,
    needs_scaled_mm,
    quantizations,
    stack,
    trained,
)
from harness import Harness, Stock
from passes import aten_graph, run_pass

import coda_inductor.backend  # noqa: F401 (registers it)
from coda_inductor.graph.sides import EARLY, Scope
from coda_inductor.rewrite.fp8.casts import expand_quantizations
from coda_inductor.runtime.fp8_casts import AMAX, CAST
from coda_inductor.semantic.fp8 import quantize, scaled_mm

E4M3 = torch.float8_e4m3fn
#: What kernels compute, in plain ops.
ALL = {"gate": "always", "reference": True}
CONTEXTS = ("bfloat16", "float32", "checkpoint")


def step(harness, recipe, how, layers):
    """``harness`` after a training step, and what came out of it."""
    torch.manual_seed(0)
    dtype = torch.float32 if how == "float32" else torch.bfloat16
    x = batch(dtype)
    model = stack(recipe, dtype, layers=layers, checkpointed=how == "checkpoint")
    return harness, trained(harness, model, x, dynamic=how == "dynamic")


@functools.cache
def our_step(recipe, how, layers):
    """Many tests look at one: it is not to be changed."""
    return step(Harness(**ALL), recipe, how, layers)


@functools.cache
def torchs_step(recipe, how, layers):
    """Torch's own."""
    return step(Stock(), recipe, how, layers)


def compiled(recipe, how="bfloat16", layers=2):
    """Our harness after a training step."""
    return our_step(recipe, how, layers)[0]


@pytest.mark.parametrize(("recipe", "how"), each_with_some(*CONTEXTS))
def test_in_float64_without_rounding_it_is_the_same_function(recipe, how):
    assert_exact(our_step(recipe, how, 1)[0], torchs_step(recipe, how, 1)[0])


@pytest.mark.parametrize(("recipe", "layers"), each_with_some(2, 2, 1))
def test_counts_follow_the_layers(recipe, layers):
    harness = compiled(recipe, layers=layers)
    ops = harness.ops()
    assert ops["aten.clone.default"] == ops["aten.max.default"] == 0
    # One cast for each tensor and pass: a gradient's two are one, as its rows and its columns.
    of_gradients = 3 * layers if recipe == "rowwise" else 0
    wanted = quantizations(recipe, 3 * layers, 2 * layers) - of_gradients
    assert ops["coda_inductor.fp8_cast.default"] == wanted
    # Read for their maxima alone: weights; the input of the first norm's result; each layer's own
    # gradient, made by a kernel of Inductor's. Columns of a norm's result need its factor first.
    columns = layers - 1 if recipe == "rowwise" else 0
    assert ops["coda_inductor.fp8_amax.default"] == 3 * layers + 1 + layers + columns
    assert harness.counts["fp8_quantize"] == quantizations(recipe, 3 * layers, 2 * layers)
    assert harness.counts["swiglu"] == harness.counts["swiglu_backward"] == layers
    assert harness.counts["residual"] == 2 * layers
    assert harness.counts["rms_norm"] == layers - 1  # the first one's input is the graph's


def sites(harness, name):
    return [s for s in harness.report.sites if s.site.endswith(name)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_epilogues_make_the_maxima(recipe):
    harness = compiled(recipe)
    (forward,) = [s for s in sites(harness, "layers.0.gate + up") if s.role == "forward"]
    rows_and_columns = 2 if recipe == "rowwise" else 1
    assert forward.absorbed.count("amax") == rows_and_columns
    assert forward.program.paired
    down = sites(harness, "layers.0.down")
    assert down[0].absorbed.count("amax") == 1  # behind the residual, for the norm that waits
    assert "mean" in down[0].absorbed
    gradient = next(s for s in down if s.role == "input gradient")
    assert gradient.absorbed.count("amax") == 2 * rows_and_columns  # of gate's gradient and of up's
    assert sum(s.role == "weight gradient" for s in harness.report.sites) == 6


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_are_the_first_thing_that_an_epilogue_does(recipe):
    harness = compiled(recipe, layers=1)
    (site,) = [s for s in sites(harness, "gate + up") if s.role == "forward"]
    kinds = {o.name: o.kind for o in site.program.operands}
    scales = [step for step in site.program.steps if {"acc0", "acc1"} & set(step.args)]
    assert [step.op for step in scales] == ["mul", "mul"]
    first = "scalar" if recipe == "tensorwise" else "col"
    assert {kinds[arg] for step in scales for arg in step.args if arg in kinds} == {first}
    assert site.program.fast
    backward = [s.program for s in harness.fused if s.role != "forward"]
    assert backward
    assert not any(program.fast for program in backward)
    dtypes = {(program.a_dtype, program.b_dtype) for program in backward if program.fp8}
    wide = "float8_e5m2" if recipe == "tensorwise" else "float8_e4m3fn"
    assert dtypes == {(wide, "float8_e4m3fn")}


def test_a_product_that_only_has_its_scales_is_cublas():
    """Which multiplies with them: nothing is saved."""
    harness = compiled("rowwise", layers=1)
    assert not [s for s in harness.report.sites if s.fused and s.role == "weight gradient"]
    assert harness.counts["epilogue"] == 0


def test_sums_of_scaled_products_are_not_joined():
    """Their scales differ: the second reads the first."""
    harness = compiled("rowwise", layers=1)
    (up,) = [s for s in sites(harness, "layers.0.up") if s.role == "input gradient"]
    assert up.absorbed[0] == "add"
    assert "tile" in {o.kind for o in up.program.operands}


def error(have, want):
    """Of all gradients together, against those of float32."""
    square = sum((a.double() - b.double()).norm() ** 2 for a, b in zip(have, want, strict=True))
    return (square / sum(b.double().norm() ** 2 for b in want)).sqrt().item()


@pytest.mark.parametrize(("recipe", "outliers"), each_with_some(False, True))
def test_gradients_are_as_exact_as_torchaos(recipe, outliers):
    x = batch()
    if outliers:
        x[:, ::4, 5] *= 1000
    torch.manual_seed(0)
    true = copy.deepcopy(Stack(layers=2).bfloat16()).float()
    want = trained(Stock(), true, x.float())
    have = trained(Harness(**ALL), stack(recipe, layers=2), x)
    torchaos = trained(Stock(), stack(recipe, layers=2), x)
    assert 0 < error(have, want) < 1.1 * error(torchaos, want)


@pytest.mark.parametrize(("recipe", "value"), each_with_some(0.0, torch.nan, torch.inf))
def test_rows_of_what_has_no_scale_come_out_as_torchaos(recipe, value):
    x = batch()
    x[0, 3] = value
    ours = trained(Harness(**ALL), stack(recipe), x)
    theirs = trained(Stock(), stack(recipe), x)
    for have, want in zip(ours, theirs, strict=True):
        assert torch.equal(have.isnan(), want.isnan())
        assert torch.equal(have.isinf(), want.isinf())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_halves_of_a_packed_weight_have_their_scales(recipe):
    ours, theirs = Harness(**ALL), Stock()
    for harness in (ours, theirs):
        torch.manual_seed(0)
        trained(harness, convert(Packed().bfloat16(), recipe), batch())
        assert harness.counts["swiglu"] == (harness is ours)
    assert_exact(ours, theirs)


def test_dynamic_rows():
    harness, found = our_step("rowwise", "dynamic", 1)
    for have, want in zip(found, torchs_step("rowwise", "dynamic", 1)[1], strict=True):
        assert (have.float() - want.float()).norm() < 0.1 * want.float().norm()
    symbolic = [s for s in harness.report.sites if s.reason == "N or K is symbolic"]
    # K of a weight's gradient is the number of rows.
    assert len(symbolic) == 3
    assert {s.refusal.code for s in symbolic} == {"symbolic-features"}


def test_what_the_backward_pass_scales_has_its_maximum_in_the_forward():
    harness = compiled("rowwise", layers=1)
    scope = Scope(harness.graph)
    early = [n for n in harness.graph.nodes if n.meta.get(EARLY)]
    assert len(early) == 2 * 5  # rows and columns of two inputs and three weights
    assert all(node in scope.forward for node in early)
    assert not any(node in scope.graded for node in early)
    # Saved are vectors of it, no FP8 copy of a weight.
    saved = [n.meta["val"] for n in harness.saved]
    assert not any(v.dtype == E4M3 for v in saved if isinstance(v, torch.Tensor))


def test_one_cast_writes_the_layouts_that_are_read_and_no_other():
    def function(x, w):
        q, s = quantize(x, [], E4M3, False, False)
        r, t = quantize(w, [], E4M3, False, False)
        arguments = s, t, torch.bfloat16, False, False
        return scaled_mm(q, r.t(), *arguments), scaled_mm(q.t(), q, *arguments)

    needs_scaled_mm()
    x, w = (torch.randn(32, 64, dtype=torch.bfloat16) for _ in range(2))
    graph = aten_graph(function, x, w)
    run_pass(expand_quantizations, graph, **ALL)
    first, second = graph.find_nodes(op="call_function", target=CAST)
    assert [a is not None for a in first.args[2:6:2]] == [True, True]
    assert [a is not None for a in second.args[2:6:2]] == [True, False]
    assert len(graph.find_nodes(op="call_function", target=AMAX)) == 2
    before = str(graph)
    run_pass(expand_quantizations, graph, **ALL)
    assert str(graph) == before
    have, want = torch.fx.GraphModule({}, graph)(x, w), function(x, w)
    torch.testing.assert_close(have, want, rtol=0, atol=0)
