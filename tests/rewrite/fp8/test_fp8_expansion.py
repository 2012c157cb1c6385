# SPDX-License-Identifier: Apache-2.0
"""Quantizations become maxima in epilogues and one cast a tensor; scaled products fuse as others.
RMSNorm in front of FP8 products waits until its result is quantized, or says why not. That results
are the same is asked in ``test_fp8_recipes``."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from harness import Harness, Stock
from passes import aten_graph, codes, run_pass
from torch import nn
from zoo import float8 as fp8

import coda_inductor.backend  # noqa: F401 (registers it)
from coda_inductor.graph.sides import EARLY, Scope
from coda_inductor.graph.walk import base
from coda_inductor.rewrite.decompose import decompose
from coda_inductor.rewrite.fp8.casts import expand_quantizations
from coda_inductor.semantic.fp8 import quantize, scaled_mm
from coda_inductor.semantic.fp8_casts import AMAX, CAST

aten, E4M3 = torch.ops.aten, torch.float8_e4m3fn
#: What kernels compute, in plain ops.
ALL = {"gate": "always", "reference": True}


@functools.cache
def compiled(recipe):
    """Our harness after a training step. Many tests look at one: it is not to be changed."""
    harness = Harness(**ALL)
    fp8.trained(harness, fp8.in_fp8(fp8.Stack, recipe, layers=2), fp8.batch())
    return harness


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_counts_follow_the_layers(recipe):
    harness, layers = compiled(recipe), 2
    ops = harness.ops()
    assert ops["aten.clone.default"] == ops["aten.max.default"] == 0
    # One cast for each tensor and pass: a gradient's two are one, as its rows and its columns.
    of_gradients = 3 * layers if recipe == "rowwise" else 0
    wanted = fp8.quantizations(recipe, 3 * layers, 2 * layers) - of_gradients
    assert ops["coda_inductor.fp8_cast.default"] == wanted
    # Read for their maxima alone: weights; the input of the first norm's result; each layer's own
    # gradient, made by a kernel of Inductor's. Columns of a norm's result need its factor first.
    columns = layers - 1 if recipe == "rowwise" else 0
    assert ops["coda_inductor.fp8_amax.default"] == 3 * layers + 1 + layers + columns
    assert harness.counts["fp8_quantize"] == fp8.quantizations(recipe, 3 * layers, 2 * layers)
    assert harness.counts["rms_norm"] == layers - 1  # the first one's input is the graph's


def sites(harness, name):
    return [s for s in harness.report.sites if s.site.endswith(name)]


def scales(program):
    """(kind, dtype) of what both accumulators are multiplied with first."""
    kinds = {o.name: (o.kind, o.dtype) for o in program.operands}
    steps = [step for step in program.steps if {"acc0", "acc1"} & set(step.args)]
    assert [step.op for step in steps] == ["mul", "mul"]
    return {kinds[arg] for step in steps for arg in step.args if arg in kinds}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_epilogues_scale_first_and_make_the_maxima(recipe):
    harness = compiled(recipe)
    (forward,) = [s for s in sites(harness, "layers.0.gate + up") if s.role == "forward"]
    rows_and_columns = 2 if recipe == "rowwise" else 1
    assert forward.absorbed.count("amax") == rows_and_columns
    assert forward.program.paired
    assert forward.program.fast
    down = sites(harness, "layers.0.down")
    assert down[0].absorbed.count("amax") == 1  # behind the residual, for the norm that waits
    assert "mean" in down[0].absorbed
    gradient = next(s for s in down if s.role == "input gradient")
    assert gradient.absorbed.count("amax") == 2 * rows_and_columns  # of gate's gradient and of up's
    assert scales(forward.program) == {("scalar" if recipe == "tensorwise" else "col", "float32")}
    backward = [s.program for s in harness.fused if s.role != "forward"]
    assert backward
    assert not any(program.fast for program in backward)
    dtypes = {(program.a_dtype, program.b_dtype) for program in backward if program.fp8}
    wide = "float8_e5m2" if recipe == "tensorwise" else "float8_e4m3fn"
    assert dtypes == {(wide, "float8_e4m3fn")}


def test_what_the_backward_pass_scales_has_its_maximum_in_the_forward():
    harness = compiled("rowwise")
    scope = Scope(harness.graph)
    early = [n for n in harness.graph.nodes if n.meta.get(EARLY)]
    assert len(early) == 2 * 2 * 5  # a layer: rows and columns of two inputs and three weights
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

    fp8.needs_scaled_mm()
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
    fp8.assert_bits(torch.fx.GraphModule({}, graph)(x, w), function(x, w))


#: A concatenation of given columns and an MLP's -> does an epilogue make the maxima of a part?
JOINED = {
    "columns": (lambda x, h: torch.cat([x, h], 1), True),
    "of batches": (lambda x, h: torch.cat([x[None], h[None]], 2).flatten(0, 1), True),
    "rows": (lambda x, h: torch.cat([torch.cat([x, x], 1), h.reshape(32, -1)[:, :128]]), False),
    "no epilogue": (lambda x, h: torch.cat([x, h.cumsum(1)], 1), False),
}


@pytest.mark.parametrize("value", [1.0, torch.nan])
@pytest.mark.parametrize(("joined", "in_epilogue"), JOINED.values(), ids=JOINED)
@pytest.mark.parametrize("dims", [[1], []])
def test_maxima_of_a_concatenation_are_those_of_its_parts(dims, joined, in_epilogue, value):

    def function(x, w):
        q, s = quantize(joined(x, F.gelu(x @ w)), dims, E4M3, False, True)
        return q.float(), s

    args = torch.randn(32, 64).bfloat16(), torch.randn(64, 192).bfloat16()
    args[0][3] = value
    graph = aten_graph(function, *args, decomposed=True)
    record = run_pass(expand_quantizations, graph, **ALL)
    ops = [node.target for node in graph.nodes]
    assert (quantize in ops) == (bool(dims) and not in_epilogue)
    assert ops.count(aten.amax.default) == (2 * in_epilogue if dims else 2 + in_epilogue)
    assert not {CAST, AMAX} & {*ops}
    decompose(graph, record)
    fp8.assert_bits(torch.fx.GraphModule({}, graph)(*args), function(*args))


class Behind(nn.Module):
    """A product, a norm, and a linear layer that reads it."""

    def __init__(self, norm=None):
        super().__init__()
        self.first = nn.Linear(fp8.D, fp8.D, bias=False)
        self.second = nn.Linear(fp8.D, fp8.HIDDEN, bias=False)
        self.norm = norm or nn.RMSNorm(fp8.D, eps=1e-5)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter, 1.0, 0.3)

    def forward(self, x):
        return self.second(self.norm(x + self.first(x)))


def run(make, recipe, harness=None, **kwargs):
    """A training step of a model that is the same each time; returns what ran it."""
    torch.manual_seed(0)
    harness = harness or Harness(**ALL)
    model = fp8.convert(make(**kwargs).bfloat16(), recipe)
    harness.train(model, fp8.batch().requires_grad_())
    return harness


@pytest.mark.parametrize(("recipe", "gamma"), [("rowwise", False), ("rowwise_with_gw_hp", True)])
def test_the_factor_is_that_of_the_cast(recipe, gamma):
    norm = nn.RMSNorm(fp8.D, eps=1e-5, elementwise_affine=gamma)
    harness = run(Behind, recipe, norm=copy.deepcopy(norm))
    assert harness.counts["rms_norm"] == 1
    assert not [r for r in harness.report.refusals if r.what == "rms_norm"]
    casts = harness.graph.find_nodes(op="call_function", target=CAST)
    factors = {n.args[1] for n in casts if n.args[1] is not None}
    assert len(factors) == 1
    weights = {base(n.args[7]) for n in casts if n.args[7] is not None}
    assert len(weights) == gamma
    # The norm's input is in memory, once, and nothing else: h never leaves the tile.
    (first,) = [s for s in harness.fused if s.site == "first" and s.role == "forward"]
    assert [store.dtype for store in first.program.stores] == ["bfloat16"]
    assert "amax" in first.absorbed
    # In the forward pass and, where the weight's gradient is FP8, in the backward.
    assert sum(n.args[1] is not None for n in casts) == 1 + (recipe != "rowwise_with_gw_hp")
    read = [n for n in harness.graph.find_nodes(op="call_function", target=AMAX) if n.args[1]]
    assert len(read) == (recipe == "rowwise")  # columns need the factor first
    fp8.assert_exact(harness, run(Behind, recipe, Stock(), norm=norm))


def test_float32_under_autocast():
    """The norm's result is float32 there, and each layer casts it for itself."""
    model, x = fp8.Stack(layers=2), fp8.batch(torch.float32)
    harness, eager = Harness(**ALL), fp8.Eager()
    want = fp8.trained(eager, copy.deepcopy(model).double(), x.double())
    model = fp8.convert(model, "rowwise")
    with torch.autocast("cpu", torch.bfloat16):
        other = fp8.trained(eager, copy.deepcopy(model), x)
        have = fp8.trained(harness, model, x)
    assert harness.counts["rms_norm"] == 1  # nothing makes the first one's input
    assert "norm-read-elsewhere" not in codes(harness)
    for ours, theirs, exactly in zip(have, other, want, strict=True):
        error, reference = ((y.double() - exactly).norm() for y in (ours, theirs))
        assert error <= 1.2 * reference


class Mixed(Behind):
    """A layer that torchao was told to leave reads the norm in the forward pass as well."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(16, fp8.D))

    def forward(self, x):
        n = self.norm(x + self.first(x))
        return self.second(n), F.linear(n, self.router)


def test_a_norm_that_others_read_stays():
    harness = run(Mixed, "tensorwise")
    assert "norm-read-elsewhere" in codes(harness)
    assert harness.counts["rms_norm"] == 0
