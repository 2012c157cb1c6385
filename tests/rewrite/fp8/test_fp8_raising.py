# SPDX-License-Identifier: Apache-2.0
"""torchao's FP8 graphs become semantic ops, equal quantizations one; decomposed, they are back.
Unfused products are given their scales where cuBLAS takes them."""

import functools

import pytest
import torch
from passes import aten_graph as traced
from passes import codes, refused, run_pass
from zoo.float8 import assert_bits, needs_scaled_mm

from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.rewrite.fp8 import rest
from coda_inductor.rewrite.fp8.raising import raise_fp8
from coda_inductor.semantic.define import DEFINITIONS
from coda_inductor.semantic.fp8 import quantize, scaled_mm
from coda_inductor.sites import Sites

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
aten_graph = functools.partial(traced, decomposed=True)


def quantize_definition(x, dims, dtype, power_of_two, divides=False):
    return DEFINITIONS[quantize].function(x, dims, dtype, power_of_two, divides)


def scaled(a, b, bias=None, *, power_of_two=True):
    q, s = quantize_definition(a, [1], E4M3, power_of_two)
    r, t = quantize_definition(b.t(), [0], E5M2, power_of_two)
    return aten._scaled_mm(q, r, s, t, bias, None, torch.bfloat16, True)


def matrices():
    return torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(48, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(("power_of_two", "biased"), [(True, False), (False, True)])
def test_it_fires_on_a_single_product_and_not_twice(power_of_two, biased):
    needs_scaled_mm()
    bias = [torch.zeros(48, dtype=torch.bfloat16)] * biased
    graph = aten_graph(lambda *t: scaled(*t, power_of_two=power_of_two), *matrices(), *bias)
    record = run_pass(raise_fp8, graph)
    assert record.fired == {"fp8_quantize": 2, "fp8_product": 1}
    (product,) = graph.find_nodes(op="call_function", target=scaled_mm)
    assert product.args[4:7] == (torch.bfloat16, True, False)
    assert [n.op for n in product.args[7:]] == ["placeholder"] * biased
    before = [node.target for node in graph.nodes]
    assert not run_pass(raise_fp8, graph).fired
    assert [node.target for node in graph.nodes] == before


@pytest.mark.parametrize("given", [True, False])
def test_a_copy_that_no_cast_of_the_graph_can_write_stays(given):
    """Of a weight that arrives in FP8 (FSDP's): kernels read along K alone."""

    def function(a, b):
        q, s = quantize_definition(a, [1], E4M3, True)
        r, t = (b, s.new_ones(())) if given else quantize_definition(b, [], E4M3, True)
        turned = r.permute(1, 0).contiguous().permute(1, 0)
        return aten._scaled_mm(q, turned, s, t.repeat(64)[None], None, None, torch.bfloat16)

    needs_scaled_mm()
    a, b = torch.randn(32, 48).bfloat16(), torch.randn(48, 64).bfloat16()
    graph = aten_graph(function, a, b.to(E4M3) if given else b)
    run_pass(raise_fp8, graph)
    (product,) = graph.find_nodes(op="call_function", target=scaled_mm)
    assert product.args[1].meta["val"].stride() == ((1, 48) if given else (64, 1))


def rows_apart(a, b):
    q, s = quantize_definition(a.view(2, 16, 64).transpose(0, 1), [2], E4M3, True)
    r, t = quantize_definition(b.t(), [0], E4M3, True)
    rows = q.reshape(32, 64), s.reshape(32, 1)
    return aten._scaled_mm(rows[0], r, rows[1], t, None, None, torch.bfloat16)


def other_rows(a, b):
    q, s = quantize_definition(a.view(16, 128), [], E4M3, True)
    r, t = quantize_definition(b.t(), [], E4M3, True)
    return aten._scaled_mm(q.view(32, 64), r, s, t, None, None, torch.bfloat16)


@pytest.mark.parametrize(("function", "number"), [(rows_apart, 2), (other_rows, 1)])
def test_views_of_quantized_tensors(function, number):
    needs_scaled_mm()
    a, b = matrices()
    graph = aten_graph(function, a, b)
    assert run_pass(raise_fp8, graph).fired == {"fp8_quantize": number, "fp8_product": 1}
    (product,) = graph.find_nodes(op="call_function", target=scaled_mm)
    assert (product.args[0].args[0].target is quantize) == (function is rows_apart)
    assert_bits(torch.fx.GraphModule({}, graph)(a, b), function(a, b))


def chain(change):
    """Of training, or of inference, which divides by its scale; with one ``change``. "float32
    maximum" is nanochat's in training, and another number where it is divided."""
    limit = 440.0 if "limit" in change else 448.0

    def function(a, b):
        of = b[: a.shape[0]] if "another amax" in change else a
        of = of.float() if "float32 maximum" in change else of
        amax = of.abs().amax(1, keepdim=True)
        if "serving" in change:
            scale = ((amax.double() if "wide" in change else amax) / limit).float()
            y, inverse = scale / a.float() if "turned" in change else a.float() / scale, scale
        else:
            eps = 1e-10 if "eps" in change else 1e-12
            scale = (limit / amax.double().clamp(min=eps)).float()
            y, inverse = a.float() * scale, scale.reciprocal()
        q = (y if "no clamp" in change else y.clamp(-448.0, 448.0)).to(E4M3)
        r, t = quantize_definition(b.t(), [0], E4M3, False, "serving" in change)
        return aten._scaled_mm(q, r, inverse, t, None, None, torch.bfloat16)

    return function


CHANGES = ["serving", "eps", "limit", "no clamp", "another amax", "float32 maximum of float64"]
CHANGES += [f"serving, {how}" for how in ("limit", "wide", "turned", "float32 maximum")]
CHANGES += ["training, float32 maximum"]


@pytest.mark.parametrize("change", CHANGES)
def test_another_chain_is_another_function(change):
    """The product is raised all the same: it needs no more than its scales."""
    needs_scaled_mm()
    a, b = matrices()
    tensors = torch.randn(32, 64, dtype=torch.float64) if "float64" in change else a, b
    graph = aten_graph(chain(change), *tensors)
    record = run_pass(raise_fp8, graph)
    assert_bits(torch.fx.GraphModule({}, graph)(*tensors), chain(change)(*tensors))
    same = change in ("serving", "training, float32 maximum")
    assert record.fired == {"fp8_quantize": 1 + same, "fp8_product": 1}
    assert codes(record) == (set() if same else {"fp8-cast"})


def test_a_scale_for_the_result_stays_and_so_does_a_product_without_scales():
    def function(a, b, one):
        return aten._scaled_mm(a.to(E4M3), b.to(E4M3).t(), one, one, None, one, torch.bfloat16)

    record = run_pass(raise_fp8, aten_graph(function, *matrices(), torch.ones(())))
    assert codes(record) == {"fp8-form"}
    assert not refused(raise_fp8, lambda a, b: a.to(E4M3).float() @ b.float().t(), *matrices())


def test_each_half_can_be_disabled():
    """Quantizations are raised for products alone."""
    for name, left in (("fp8_quantize", {"fp8_product": 1}), ("fp8_product", {})):
        graph = aten_graph(lambda a, b: scaled(a, b, power_of_two=False), *matrices())
        assert run_pass(raise_fp8, graph, disable=[name]).fired == left


def test_a_scale_of_another_tensor_is_read_as_it_is():
    def function(a, b, c):
        (q, _), (_, other) = (quantize_definition(x, [1], E4M3, True) for x in (a, c))
        r, t = quantize_definition(b.t(), [0], E4M3, True)
        return aten._scaled_mm(q, r, other, t, None, None, torch.bfloat16)

    a, b = matrices()
    graph = aten_graph(function, a, b, a.flip(0))
    run_pass(raise_fp8, graph)
    assert len(graph.find_nodes(op="call_function", target=aten.amax.default)) == 1


HALF = torch.bfloat16


@pytest.mark.parametrize(("out", "cublas", "no_kernels", "stays"), [
    (HALF, True, None, False), (torch.float32, True, None, True), (HALF, False, None, True),
    (HALF, True, refuse("no-cuda", "no GPU"), True),
], ids=["", "dtype", "another GPU", "no kernels"])  # fmt: skip
def test_a_product_is_given_its_scales_or_stays_torchaos(
    monkeypatch, out, cublas, no_kernels, stays
):
    monkeypatch.setattr(availability, "scales_vectors", lambda _: cublas)
    a, b = (x.to(E4M3) for x in matrices())
    scales = torch.rand(32, 1), torch.rand(1, 48)
    graph = traced(lambda a, *of: scaled_mm(a, *of, out, False, True), a, b.t(), *scales)
    record = Record(parse(None, {}), "test")
    record.sites = Sites(Plan(record.options, no_kernels=no_kernels, on_gpu=True))
    rest.finish_fp8(graph, record)
    (node,) = graph.find_nodes(op="call_function", target=scaled_mm)
    assert node.args[6] is stays  # multiplied after it
