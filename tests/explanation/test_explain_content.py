# SPDX-License-Identifier: Apache-2.0
"""What an explanation says: sites, bytes, saved tensors, near misses and their remedies."""

import torch
from harness import Harness, Stock
from subjects import LAYERS, SUBJECTS, Gated, Residual, explained
from torch import nn

from coda_inductor import explain
from coda_inductor.explanation.capture import capture
from coda_inductor.explanation.flow import repeated
from coda_inductor.explanation.kernels import kernels
from coda_inductor.explanation.naming import epilogue_work, leaf
from coda_inductor.explanation.result import Explanation
from coda_inductor.options import parse
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.report import fold, general_path, readable_bytes
from coda_inductor.runtime import linear_cross_entropy

X = torch.ones(32, 64, dtype=torch.bfloat16)


def test_llama_is_explained_as_it_is_compiled():
    found, _ = explained("llama")
    model, args, kwargs, _ = SUBJECTS["llama"]()
    harness = Harness(gate="always")
    harness.run(lambda ids: model(ids, **kwargs).logits, *args)
    ours = [(s.site.split("layers")[-1], s.how, s.patterns, s.absorbed) for s in found.sites]
    compiled = harness.report.sites
    assert ours == [(s.site.split("layers")[-1], s.how, s.patterns, s.absorbed) for s in compiled]
    assert found.gemms == 7 * LAYERS + 1  # q, k, v, o, gate, up, down; the head
    assert found.gemms_fused == found.gemms - 1  # v of the first layer
    assert f"{found.gemms_fused} of {found.gemms} GEMMs may absorb" in found.summary


def test_bytes_of_a_site_are_what_its_kernels_read_and_write():
    with torch.no_grad():
        found = explain(Residual().bfloat16(), X, options={"gate": "always"})
    up, down = found.sites
    # A 32 x 64, B 64 x 256, product 32 x 256; the activation reads the product and writes another
    assert up.bytes_before == 2 * (32 * 64 + 64 * 256 + 3 * 32 * 256)
    assert up.bytes_after == 2 * (32 * 64 + 64 * 256 + 32 * 256)
    # A 32 x 256, B 256 x 64, product, its second reading, residual and sum 32 x 64 each
    assert down.bytes_before == 2 * (32 * 256 + 256 * 64 + 4 * 32 * 64)
    assert down.bytes_after == 2 * (32 * 256 + 256 * 64 + 2 * 32 * 64)
    for site in found.sites:
        assert site.bytes_saved == site.bytes_before - site.bytes_after
    assert (found.before.kernels, found.after.kernels) == (4, 2)
    assert found.bytes_before == up.bytes_before + down.bytes_before
    assert found.bytes_after == up.bytes_after + down.bytes_after


def test_saved_tensors_are_those_of_the_partitioner():
    model, x = Gated().bfloat16(), X
    found = explain(model, x, options={"gate": "always"})
    stock, ours = Stock(), Harness(gate="always")
    stock.train(model, x)
    ours.train(model, x)
    assert found.training
    assert found.saved_bytes_before == stock.saved_bytes() == 3 * 32 * 256 * 2
    assert found.saved_bytes_after == ours.saved_bytes() == 2 * 32 * 256 * 2
    assert {t.shape for t in found.saved_before} == {(32, 256)}
    roles = [s.role for s in found.sites]
    assert [roles.count(r) for r in ("forward", "input gradient", "weight gradient")] == [2, 1, 3]


def test_training_explains_every_gemm_of_both_passes():
    found, _ = explained("llama, training")
    assert found.gemms == 3 * (7 * 2 + 1)
    assert found.saved_bytes_after < found.saved_bytes_before
    assert [after.direction for _, after in found.blocks] == ["forward", "backward"]
    names = [site.site.split(".", 3)[-1] for site in found.sites]
    joined = "v_proj + k_proj + q_proj"  # q's gradient, rotated back, lies in the order of rows
    assert names.count(f"self_attn.{joined}") == 2
    backward = {p for s in found.sites if s.role != "forward" for p in s.patterns}
    assert {"rms_norm_backward", "swiglu_backward"} <= backward


def test_the_block_is_the_middle_layer():
    found, _ = explained("llama")
    ((before, after),) = found.blocks
    assert before.name == after.name == f"model.layers.{LAYERS // 2}"
    kinds = [part.kind for part in before.parts]
    assert kinds.count("gemm") == 7
    assert kinds.count("attention") == 1
    assert [p.kind for p in after.parts].count("fused") == 6  # gate and up are one
    titles = [part.title for part in before.parts]
    assert {"residual + RMSNorm", "SiLU * up", "rotary"} <= set(titles)
    assert titles.index("up_proj") < titles.index("SiLU * up") < titles.index("down_proj")
    (down,) = [part for part in after.parts if part.title == "down_proj"]
    assert down.work == ("+ residual", "* norm weight", "row statistics")
    assert any("up_proj" in source for source in down.reads)
    assert after.count < before.count
    assert after.moved < before.moved


def test_float16_norms_are_near_misses_with_the_option_as_remedy():
    found, _ = explained("llama, float16")
    misses = [m for m in found.near_misses if "fp16_norms" in m.remedy.text]
    assert all(isinstance(miss, Refusal) for miss in (*found.near_misses, *found.unfused))
    assert len(misses) == 3  # a layer's two norms, and the last norm
    assert all(m.remedy.possible for m in misses)
    assert "options={'fp16_norms': True}" in str(found)


def test_without_a_gpu_a_note_says_what_an_h100_would_do():
    notes = explained("float32")[0].notes
    assert "only bfloat16 and float16" in notes[0]
    assert "all of them would run as kernels" in explained("llama")[0].notes[0]
    with torch.no_grad():
        gated = explain(Residual().bfloat16(), X)
    assert "the host is the limit" in gated.notes[0]


def test_reasons_are_grouped_by_their_code_whatever_they_say():
    odd = [refuse("not-multiple-of-8", text).at("gemm", text) for text in ("N=9", "no such luck")]
    found = Explanation("model", "cpu", training=False, near_misses=odd)
    ((code, group),) = found.advised.items()
    assert (code, group) == ("not-multiple-of-8", odd)
    assert str(found).count(odd[0].remedy.text) == 1


def test_layers_fold_into_one_row():
    found, _ = explained("llama")
    rows = fold(found.sites)
    by_name = {(row.name, row.times): row for row in rows}
    assert sum(row.times for row in rows) == len(found.sites)
    assert by_name["model.layers.*.self_attn.q_proj", LAYERS - 1].layers == "1, 2"
    assert by_name["model.layers.0.self_attn.q_proj", 1].layers == "0"
    assert by_name["model.layers.*.mlp.gate_proj + up_proj", LAYERS].layers == "0, 1, 2"
    assert (
        len(rows) == 11
    )  # q, k, v of the first layer, of the others; o, gate + up, down; two last


def test_names_for_people():
    assert general_path("h.3.mlp.0.fc") == "h.*.mlp.0.fc"
    assert general_path("lm_head") == "lm_head"
    names = [
        leaf(p) for p in ("model.layers.0.mlp.up_proj", "h.0.fc.2", "layer.1.output.dense", "a")
    ]
    assert names == ["up_proj", "fc.2", "output.dense", "a"]
    sizes = [readable_bytes(b) for b in (0, 999, 1000, 8_388_608, 99_600_000, 3e12)]
    assert sizes == ["0 B", "999 B", "1 KB", "8.39 MB", "100 MB", "3 TB"]


def test_epilogue_work_is_named_by_what_it_does():
    found, _ = explained("GPT-2")
    work = {tuple(epilogue_work(site)) for site in found.fused}
    before = ("+ bias", "+ residual", "* norm weight", "row statistics")
    after = ("* row scale", "+ bias")  # the qkv projection; the MLP's has the activation too
    assert work == {before, after, (*after, "GELU (tanh)")}


def test_slices_of_the_logits_gradient_count_as_traffic(monkeypatch):
    """They are written once and read by two products, though none is ever whole."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 2**8)
    head = nn.Linear(16, 64, bias=False).bfloat16()

    def loss(x, labels):
        return nn.functional.cross_entropy(head(torch.tanh(x)).float(), labels)

    x = torch.randn(32, 16).bfloat16().requires_grad_()
    found = capture(loss, (x, torch.arange(32)), {}, parse(None, {}))
    graphs = found.graphs[0].ours.graphs
    sliced = [k for g in graphs for k in kernels(g) if k.inner]
    assert [k.inner for k in sliced] == [3 * 32 * 64 * 2]
    assert sliced[0].bytes > sliced[0].inner


def test_what_repeats_is_found():
    layer = ["self_attn.q", "self_attn.o", "mlp.up", "mlp.down"]
    model = [f"model.layers.{i}.{name}" for i in range(5) for name in layer]
    assert repeated([*model, "lm_head"]) == "model.layers.2"
    assert repeated(["0", "2", "4"]) is None  # nn.Sequential: products, not blocks
    assert repeated(["enc.0.a", "enc.0.b", "lm_head"]) is None  # one layer does not repeat
    assert repeated([f"{i}.{name}" for i in range(2) for name in layer]) == "1"
