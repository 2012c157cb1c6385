# SPDX-License-Identifier: Apache-2.0
"""torchao's FP8 in recipes of training and ways of inference: every chain is raised, and what is
made of it computes the same. What is rounded differs from torchao's own run, so that results agree
in float64 where nothing is rounded at all, and else in their error against float32."""

import copy

import pytest
import torch
from harness import Harness, Stock
from zoo import float8 as fp8

from coda_inductor.semantic.fp8 import quantize, scaled_mm

#: So that nothing else than FP8 is rewritten, and results can be compared bit for bit.
PLAIN = {"disable": ["idioms", "fuse"]}
#: What kernels compute, in plain ops.
ALL = {"gate": "always", "reference": True}


def cases(text):
    """Of "recipe: context context, ..."; a "-" is no context."""
    split = (part.split(":") for part in text.split(","))
    return [(how.strip(), context) for how, contexts in split for context in contexts.split()]


def made(how, context):
    """(a layer in FP8, what it is called with, how it is compiled)."""
    dtype = torch.float32 if context in ("float32", "autocast") else torch.bfloat16
    checkpointed = {"checkpointed": True} if context == "checkpoint" else {}
    model = fp8.in_fp8(fp8.Stack, how, dtype, bias=context == "bias", **checkpointed)
    return model, fp8.batch(dtype), {"dynamic": context == "dynamic"}


RAISED = "tensorwise: checkpoint, rowwise: autocast, row: bias, tensor: dynamic"


@pytest.mark.parametrize(("how", "context"), cases(RAISED))
def test_every_chain_is_raised_and_equal_ones_are_one(how, context):
    model, x, compiled = made(how, context)
    harness = fp8.Raised()
    with torch.autocast("cpu", torch.bfloat16, enabled=context == "autocast"):
        fp8.ran(harness, how, model, x, **compiled)
    # In inference weights are quantized already; gate and up share their input's.
    want = fp8.quantizations(how, 3, 2) if how in fp8.RECIPES else 2, fp8.products(how, 3)
    ops, record = harness.ops(), harness.record
    assert (ops["coda_inductor.quantize.default"], ops["coda_inductor.scaled_mm.default"]) == want
    assert (record.fired["fp8_quantize"], record.fired["fp8_product"]) == want
    assert not record.report.refusals
    for left in ("_scaled_mm", "abs", "amax", "max", "exp2", "clone", "repeat", "reciprocal",
                 "clamp_max"):  # fmt: skip
        assert ops[f"aten.{left}.default"] == 0
    if context == "checkpoint":
        # What it recomputes is marked so; the weight that the backward pass quantizes lies outside
        # of it and is not merged with it.
        found = harness.graph.find_nodes(op="call_function", target=quantize)
        marked = [n for n in found if n.meta.get("recompute")]
        assert len(marked) == 2 + 3
        assert all(n.meta.get("recompute") for node in marked for n in node.users)
    if how not in fp8.RECIPES:
        found = harness.graph.find_nodes(op="call_function", target=scaled_mm)
        assert all(len(n.args) == 7 + (context == "bias") for n in found)
        ranks = {tuple(a.meta["val"].dim() for a in n.args[2:4]) for n in found}
        assert ranks == ({(2, 2)} if how == "row" else {(0, 0)})


#: Of inference; the gradient of a weight sums over multiples of 16.
ROWS = {"ragged": (3, 7), "one": (1, 1)}
BITS = "tensorwise: -, rowwise: float32, row: bias, tensor: one, static: ragged"


@pytest.mark.parametrize(("how", "context"), cases(BITS))
def test_decomposed_it_is_what_it_was_bit_for_bit(how, context):
    model, x, _ = made(how, context)
    x = fp8.hard(x.dtype, ROWS.get(context, (2, 16)))
    other = copy.deepcopy(model)
    fp8.assert_bits(fp8.ran(Harness(**PLAIN), how, model, x), fp8.ran(fp8.Eager(), how, other, x))


EXACT = "rowwise: float32, rowwise_with_gw_hp: checkpoint, tensor: float32, static: -"


@pytest.mark.parametrize(("how", "context"), cases(EXACT))
def test_in_float64_without_rounding_it_is_the_same_function(how, context):
    model, x, _ = made(how, context)
    ours, theirs = Harness(**ALL), Stock()
    for harness in (ours, theirs):
        fp8.ran(harness, how, model, x)
    fp8.assert_exact(ours, theirs)
    if how == "static":  # nothing is read for a maximum
        assert not [op for op in ours.ops() if "fp8_" in op]


@pytest.mark.parametrize("how", ["tensorwise", "row"])
def test_halves_of_a_packed_weight(how):
    """In training each has its scale; in inference one product is left."""
    model, ours, theirs = fp8.in_fp8(fp8.Packed, how, bias=how == "row"), Harness(**ALL), Stock()
    for harness in (ours, theirs):
        fp8.ran(harness, how, model, fp8.batch())
    fp8.assert_exact(ours, theirs)
    assert how != "row" or ours.counts["fp8_product"] == 2


def error(have, want):
    """Of all tensors together, against those of float32."""
    square = sum((a.double() - b.double()).norm() ** 2 for a, b in zip(have, want, strict=True))
    return (square / sum(b.double().norm() ** 2 for b in want)).sqrt().item()


OUTLIERS = "rowwise: outliers dynamic, row: outliers, static: -"


@pytest.mark.parametrize(("how", "context"), cases(OUTLIERS))
def test_it_is_as_exact_as_torchao(how, context):
    x, layers = fp8.batch(), 1 if context == "dynamic" else 2
    if context == "outliers":
        x[:, ::4, 5] *= 1000
    torch.manual_seed(0)
    true = copy.deepcopy(fp8.Stack(layers=layers).bfloat16()).float()
    want = fp8.ran(fp8.Eager(), how, true, x.float())
    models = [fp8.in_fp8(fp8.Stack, how, example=x, layers=layers) for _ in range(2)]
    have, theirs = (
        fp8.ran(each, how, model, x, dynamic=context == "dynamic")
        for each, model in zip((Harness(**ALL), fp8.Eager()), models, strict=True)
    )
    assert 0 < error(have, want) < 1.1 * error(theirs, want)


SPECIAL = "tensorwise: 0, row: nan, tensor: inf"


@pytest.mark.parametrize(("how", "value"), cases(SPECIAL))
def test_rows_of_what_has_no_scale_come_out_as_torchaos(how, value):
    x = fp8.batch()
    x[0, 3] = float(value)
    ours, theirs = (
        fp8.ran(harness, how, fp8.in_fp8(fp8.Stack, how), x)
        for harness in (Harness(**ALL), fp8.Eager())
    )
    for have, want in zip(ours, theirs, strict=True):
        assert torch.equal(have.isnan(), want.isnan())
        assert torch.equal(have.isinf(), want.isinf())
    if how == "row":  # other rows are as they are without it
        assert ours[0].isnan().any(-1).sum() == 1
