# SPDX-License-Identifier: Apache-2.0
"""torchao's FP8 inference: dynamic scales of rows or of tensors, and static ones."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from casting import same, subject
from float8 import Packed, Raised, Stack, assert_bits, assert_exact, batch, serve
from harness import Harness, Stock
from passes import aten_graph as traced
from passes import codes, run_pass

from coda_inductor.rewrite.fp8.raising import raise_fp8
from coda_inductor.semantic.fp8 import quantize, quantize_definition, scaled_mm

aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn
aten_graph = functools.partial(traced, decomposed=True)
#: So that nothing else than FP8 is rewritten, and results can be compared bit for bit.
PLAIN = {"disable": ["idioms", "fuse"]}
#: What kernels compute, in plain ops.
ALL = {"gate": "always", "reference": True}
DYNAMIC = ("row", "tensor")


def served(how, dtype=torch.bfloat16, **kwargs):
    torch.manual_seed(0)
    return serve(Stack(**kwargs).to(dtype), how, batch(dtype))


def both(model, x, **options):
    """(our harness, our result, torch's own)."""
    harness = Harness(**options)
    return harness, harness.run(model, x), Stock().run(model, x)


@pytest.mark.parametrize("context", ["", "bias", "dynamic"])
@pytest.mark.parametrize("how", DYNAMIC)
def test_every_chain_is_raised_and_equal_ones_are_one(how, context):
    layers = 2
    harness = Raised()
    model = served(how, layers=layers, bias=context == "bias")
    harness.run(model, batch(), dynamic=context == "dynamic")
    ops = harness.ops()
    assert ops["coda_inductor.quantize.default"] == 2 * layers  # gate and up share their input's
    assert ops["coda_inductor.scaled_mm.default"] == 3 * layers
    for left in ("_scaled_mm", "abs", "amax", "reciprocal", "clamp_max"):
        assert ops[f"aten.{left}.default"] == 0
    assert harness.record.fired == {"fp8_quantize": 2 * layers, "fp8_product": 3 * layers}
    assert not harness.record.report.refusals
    products = harness.graph.find_nodes(op="call_function", target=scaled_mm)
    assert all(len(n.args) == 7 + (context == "bias") for n in products)
    ranks = {tuple(a.meta["val"].dim() for a in n.args[2:4]) for n in products}
    assert ranks == ({(2, 2)} if how == "row" else {(0, 0)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", DYNAMIC)
def test_the_op_is_torchaos_function(how, dtype):
    """NaN, inf, outliers and rows of zeros, which become NaN, included."""
    ao = pytest.importorskip("torchao.quantization")
    workflow = pytest.importorskip("torchao.quantization.quantize_.workflows")
    by = {"row": ao.PerRow, "tensor": ao.PerTensor}[how]()
    for x in (subject(24, 64, dtype), subject(3, 5, dtype), batch(dtype)[0] * 1e-36):
        want = workflow.Float8Tensor.from_hp(x, E4M3, by)
        q, scale = quantize(x, [1] if how == "row" else [], E4M3, False, True)
        assert same(scale, want.scale.reshape(scale.shape))
        assert same(q, want.qdata)
    row = subject(24, 64, dtype)[12]
    assert quantize(row[None], [1], E4M3, False, True)[0].float().isnan().all()


CASES = [
    ("row", {}, (2, 16)), ("row", {"bias": True}, (3, 7)), ("row", {}, (1, 1)),
    ("tensor", {"bias": True}, (2, 16)), ("tensor", {}, (1, 7)), ("static", {}, (3, 7)),
    ("tensor", {}, (1, 1)), ("static", {}, (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("how", "kwargs", "rows"), CASES)
def test_decomposed_it_is_what_it_was_bit_for_bit(how, kwargs, rows):
    x = batch(rows=rows)
    x[0, 0, 3] = 1000
    if rows[1] > 1:
        x[0, 1], x[0, 2] = 0, x[0, 2] * 1e-20
    _, have, want = both(served(how, layers=2, **kwargs), x, **PLAIN)
    assert_bits(have, want)


@pytest.mark.parametrize(
    ("how", "context"),
    [("row", ""), ("row", "bias"), ("tensor", "bias"), ("tensor", "float32"), ("static", "")],
)
def test_in_float64_without_rounding_it_is_the_same_function(how, context):
    dtype = torch.float32 if context == "float32" else torch.bfloat16
    model = served(how, dtype, layers=2, bias=context == "bias")
    harness, stock = Harness(**ALL), Stock()
    for each in (harness, stock):
        each.run(model, batch(dtype))
    assert_exact(harness, stock)


@pytest.mark.parametrize(
    ("how", "layers", "rows"),
    [("row", 1, (2, 16)), ("row", 3, (1, 16)), ("tensor", 2, (2, 16)), ("tensor", 2, (1, 16))],
)
def test_counts_follow_the_layers(how, layers, rows):
    harness, *_ = both(served(how, layers=layers), batch(rows=rows), **ALL)
    ops = harness.ops()
    assert ops["aten._scaled_mm.default"] == ops["aten.max.default"] == 0
    # The first norm's input is given: by rows, the kernel that makes its result casts it as well.
    given = int(how == "tensor")
    assert ops["coda_inductor.fp8_cast.default"] == 2 * layers - 1 + given
    assert ops["coda_inductor.fp8_amax.default"] == given
    counts = harness.counts
    assert counts["swiglu"] == layers
    assert counts["residual"] == layers
    assert counts["rms_norm"] == layers - 1
    assert counts["fp8_product"] == 3 * layers
    for i in range(layers):
        (pair,) = [s for s in harness.fused if s.site.endswith(f"layers.{i}.gate + up")]
        assert pair.program.paired
        assert pair.program.fast
        assert pair.absorbed.count("amax") == 1
        kinds = {o.name: (o.kind, o.dtype) for o in pair.program.operands}
        scales = [s for s in pair.program.steps if {"acc0", "acc1"} & set(s.args)]
        first = ("col" if how == "row" else "scalar", "float32")
        assert {kinds[a] for s in scales for a in s.args if a in kinds} == {first}
    down = [s for s in harness.fused if s.site.endswith("down")]
    assert [s.absorbed.count("amax") for s in down] == [1] * (layers - 1) + [0]
    assert len(harness.fused) == 2 * layers


@pytest.mark.parametrize("layers", [1, 3])
def test_with_a_static_scale_the_epilogue_stores_fp8(layers):
    harness, have, want = both(served("static", layers=layers), batch(), **ALL)
    assert "fp8-overflow" not in codes(harness)
    sites = [s for s in harness.fused if s.site.endswith("gate")]
    assert len(sites) == harness.counts["swiglu"] == layers
    for site in sites:
        assert {store.dtype for store in site.program.stores} == {"float8_e4m3fn"}
    assert harness.counts["residual"] == layers
    ops = harness.ops()
    assert not [op for op in ops if "fp8_" in op]  # nothing is read for a maximum, or to be cast
    assert (have - want).norm() < 0.05 * want.norm()


def error(have, want):
    return (have.double() - want.double()).norm().item() / want.double().norm().item()


@pytest.mark.parametrize(("how", "outliers"), [("row", True), ("tensor", False), ("static", True)])
def test_it_is_as_exact_as_torchao(how, outliers):
    torch.manual_seed(0)
    model, x = Stack(layers=2).bfloat16(), batch()
    if outliers:
        x[:, ::4, 5] *= 1000
    want = copy.deepcopy(model).float()(x.float()).detach()
    _, have, theirs = both(serve(model, how, x), x, **ALL)
    assert 0 < error(have, want) < 1.1 * error(theirs, want)


@pytest.mark.parametrize(
    ("how", "value"),
    [("row", 0.0), ("row", torch.nan), ("row", torch.inf), ("tensor", torch.inf), ("static", 0.0)],
)
def test_rows_of_what_has_no_scale_come_out_as_torchaos(how, value):
    x = batch()
    x[0, 3] = value
    _, have, want = both(served(how), x, **ALL)
    assert torch.equal(have.isnan(), want.isnan())
    assert torch.equal(have.isinf(), want.isinf())
    if how == "row":  # other rows are as they are without it
        assert have.isnan().any(-1).sum() == 1


@pytest.mark.parametrize("change", ["limit", "wide", "another amax", "turned", "no clamp"])
def test_another_chain_is_another_function(change):
    def function(a, b):
        amax = (b if change == "another amax" else a).abs().amax(1, keepdim=True)[: a.shape[0]]
        scale = (amax.double() if change == "wide" else amax) / (440 if change == "limit" else 448)
        scale = scale.float()
        wide = scale / a.float() if change == "turned" else a.float() / scale
        q = (wide if change == "no clamp" else wide.clamp(-448.0, 448.0)).to(E4M3)
        r, t = quantize_definition(b.t(), [0], E4M3, False, True)
        return aten._scaled_mm(q, r, scale, t, None, None, torch.bfloat16)

    a, b = (torch.randn(n, 64, dtype=torch.bfloat16) for n in (32, 48))
    graph = aten_graph(function, a, b)
    record = run_pass(raise_fp8, graph)
    assert record.fired == {"fp8_quantize": 1, "fp8_product": 1}
    assert codes(record) == {"fp8-cast"}


def test_a_scale_for_the_result_stays():
    def function(a, b, one):
        return aten._scaled_mm(a.to(E4M3), b.to(E4M3).t(), one, one, None, one, torch.bfloat16)

    a, b = (torch.randn(n, 64, dtype=torch.bfloat16) for n in (32, 48))
    record = run_pass(raise_fp8, aten_graph(function, a, b, torch.ones(())))
    assert codes(record) == {"fp8-form"}


@pytest.mark.parametrize(("how", "bias"), [("row", True), ("tensor", False), ("static", False)])
def test_a_packed_weight_stays_one(how, bias):
    torch.manual_seed(0)
    model = serve(Packed(bias).bfloat16(), how, batch())
    harness, have, want = both(model, batch(), **ALL)
    assert harness.counts["fp8_product"] == 2
    assert (have - want).norm() < 0.05 * want.norm()
    stock = Stock()
    stock.run(model, batch())
    assert_exact(harness, stock)


def test_through_inductor():
    """The backend as users call it, code generation included."""
    x, model, found = batch(), served("row"), []
    for backend, options in (("coda", ALL), ("eager", None)):
        torch._dynamo.reset()
        with torch.no_grad():
            found.append(torch.compile(model, backend=backend, options=options)(x))
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()
    assert torch._dynamo.utils.counters["coda"]["fp8_product"] == 3


def test_a_stock_llama():
    transformers = pytest.importorskip("transformers")
    layers = 2
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip
    model = serve(transformers.LlamaForCausalLM(config).bfloat16().eval(), "row")
    tokens = torch.arange(24).view(2, 12)
    harness = Harness(**ALL)
    have = harness.run(lambda x: model(x, use_cache=False).logits, tokens)
    want = Stock().run(lambda x: model(x, use_cache=False).logits, tokens)
    assert (have - want).norm() < 0.1 * want.norm()
    counts, ops = harness.counts, harness.ops()
    assert counts["fp8_product"] == 7 * layers + 1
    assert counts["fp8_quantize"] == 4 * layers + 1  # q, k and v share one, gate and up too
    assert counts["swiglu"] == layers
    assert counts["residual"] == counts["rms_norm"] == 2 * layers
    # By rows, the first norm's kernel casts as well, and so does that behind attention.
    assert ops["coda_inductor.fp8_cast.default"] == 4 * layers + 1 - (1 + layers)
