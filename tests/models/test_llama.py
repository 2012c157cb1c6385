# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Llama, unmodified: what fires follows from the number of layers, and it agrees.

The input norm of the first layer stays: its input is an embedding, not a GEMM's product. In its
place the final norm is deferred, so that L layers defer 2 L norms.
"""

from __future__ import annotations

import copy

import pytest
import torch
from checking import leave_custom_ops
from harness import Harness, Stock
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128
aten = torch.ops.aten


def llama(layers: int, dtype: torch.dtype = torch.float32, attention: str = "sdpa"):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a gamma in the wrong place
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.to(dtype)


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def expected_counts(layers: int, masks: int | None = None) -> dict[str, int]:
    """``masks``: how many layers see a mask made of constants; all of them if not given."""
    counts = {"rms_norm": 2 * layers, "swiglu": layers, "residual": 2 * layers}
    counts["rotary"] = 2 * layers
    masks = layers if masks is None else masks
    return counts | ({"constant_mask": masks} if masks else {})


def relative_error(have: torch.Tensor, want: torch.Tensor) -> float:
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


def run(model, ids, dynamic=None, **kwargs):
    """Harness, our logits, eager's logits."""
    harness = Harness()
    ours = harness.run(model, ids, use_cache=False, dynamic=dynamic, **kwargs).logits
    with torch.no_grad():
        eager = model(ids, use_cache=False, **kwargs).logits
    assert ours.shape == eager.shape
    assert ours.dtype == eager.dtype
    return harness, ours, eager


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [1, 3])
def test_float32_counts_and_logits(layers, attention):
    harness, ours, eager = run(llama(layers, attention=attention), tokens())
    assert harness.counts == expected_counts(layers, layers if attention == "sdpa" else 0)
    assert relative_error(ours, eager) < 1e-5


def test_float64_logits():
    # Hugging Face's own float32 casts (norm statistics, rotary) limit even float64 models.
    harness, ours, eager = run(llama(2, torch.float64), tokens())
    assert harness.counts["residual"] == 4
    assert relative_error(ours, eager) < 1e-6


@pytest.mark.parametrize("layers", [1, 3])
def test_bfloat16_is_no_less_accurate_than_eager(layers):
    model, ids = llama(layers, torch.bfloat16), tokens(4, 32)
    harness, ours, eager = run(model, ids)
    with torch.no_grad():
        exact = model.double()(ids, use_cache=False).logits
    assert harness.counts == expected_counts(layers)
    assert relative_error(ours, exact) < 1.2 * relative_error(eager, exact)


def test_one_dynamic_graph_serves_every_length():
    model, harness = llama(2), Harness()
    compiled = torch.compile(model, backend=harness, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 9), (3, 5), (2, 31)):
            ids = tokens(*shape)
            ours = compiled(ids, use_cache=False).logits
            assert relative_error(ours, model(ids, use_cache=False).logits) < 1e-5
    patterns = [name for site in harness.report.sites for name in site.patterns]
    # rms_norm shows at both ends: the GEMM in front and the ones behind (q, k, v; gate and up).
    assert patterns.count("swiglu") == 2
    assert patterns.count("residual") == patterns.count("rotary") == 4
    attention = torch.nn.functional.scaled_dot_product_attention
    calls = [n for n in harness.raised.nodes if n.target is attention]
    assert [n.kwargs["attn_mask"] is None for n in calls] == [False, False]  # cannot be evaluated


def test_only_the_last_logits_are_computed():
    harness, ours, _ = run(llama(1), tokens(), logits_to_keep=1)
    assert ours.shape == (2, 1, VOCABULARY)
    # The head reads a slice of the normalized tensor: the final norm is not deferred.
    counts = {"rms_norm": 1, "swiglu": 1, "residual": 2, "rotary": 2, "constant_mask": 1}
    assert harness.counts == counts


def test_padded_batch():
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    harness, ours, eager = run(llama(2), tokens(), attention_mask=mask)
    assert harness.counts == expected_counts(2, masks=0)  # it depends on the user's
    assert relative_error(ours[mask.bool()], eager[mask.bool()]) < 1e-5


def test_prefill_and_decode_with_a_cache():
    model = llama(2)
    compiled = torch.compile(model, backend=Harness())
    ids = tokens(2, 6)
    with torch.no_grad():
        ours, eager = compiled(ids), model(ids)
        assert relative_error(ours.logits, eager.logits) < 1e-5
        step = ids[:, -1:]
        ours = compiled(step, past_key_values=ours.past_key_values)
        eager = model(step, past_key_values=eager.past_key_values)
    assert relative_error(ours.logits, eager.logits) < 1e-5


def test_table_names_every_gemm_and_lists_the_near_miss():
    harness, _, _ = run(llama(1), tokens())
    table = harness.report.table().replace("\n", "")
    # v, q and k share one input; gate and up are one site; then o, down, head.
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head")
    assert [n for n in names if n not in "".join(table.split())] == []
    assert len(harness.report.sites) == 7
    assert "near miss: rms_norm" in table
    assert "its input is not made by a GEMM" in "".join(harness.report.near_misses)


def test_every_projection_behind_a_norm_applies_the_scale():
    harness, _, _ = run(llama(2), tokens())
    kinds = {
        name: [o.kind for o in site.program.operands]
        for site in harness.fused
        for name in ("q_proj", "gate_proj", "o_proj", "down_proj", "lm_head")
        if name in site.site
    }
    assert kinds["q_proj"] == [
        "col",
        "table",
        "table",
    ]  # of layer 1; layer 0 has an embedding in front
    assert kinds["gate_proj"] == ["col"]
    assert kinds["lm_head"] == ["col"]
    assert kinds["o_proj"] == ["tile", "row"]
    assert kinds["down_proj"] == ["tile", "row"]


@pytest.mark.parametrize("layers", [1, 3])
def test_training_counts_and_gradients(layers):
    model, ids = llama(layers).train(), tokens()
    harness = Harness()
    harness.train(model, ids, labels=ids, use_cache=False).loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for pattern, times in expected_counts(layers).items():
        assert harness.counts[pattern] >= times
    assert harness.counts["rms_norm_backward"] == 2 * layers
    for name, parameter in model.named_parameters():
        assert relative_error(ours[name], parameter.grad) < 1e-5


def test_one_gemm_makes_the_gradient_of_queries_keys_and_values():
    """The kernels that rotate dq and dk back write them, and dv, beside each other."""
    harness, ids = Harness(), tokens()
    harness.train(llama(1).train(), ids, labels=ids, use_cache=False)
    fused = [site.site.rpartition("self_attn.")[2] for site in harness.fused]
    assert "v_proj + k_proj + q_proj" in fused


def test_nothing_around_attention_is_laid_out_anew():
    """Queries, keys, values and the result are in one layout for attention and for projections. Of
    the gradients one copy a layer is left, where torch.compile copies and concatenates."""
    model, ids = llama(2).bfloat16().train(), tokens(2, 16)
    for attention in (layer.self_attn for layer in model.model.layers):
        attention.num_key_value_groups = 1  # off CUDA, repeated heads are copies
        attention.k_proj, attention.v_proj = copy.deepcopy((attention.q_proj,) * 2)
    found = []
    for harness in (Harness(gate="always", reference=True), Stock()):
        harness.train(model, ids, labels=ids, use_cache=False)
        copies = [
            n for n in harness.graph.nodes if n.target in (aten.clone.default, aten.cat.default)
        ]
        large = [
            n for n in copies if n.meta["val"].numel() >= ids.numel() * model.config.hidden_size
        ]
        found.append(sum(map(lays_out_anew, large)))
    # Queries' and keys' of each layer: halves, and rows of the gradient.
    assert found == [2, 2 * 2 * 2]


def lays_out_anew(node) -> bool:
    source, have = node.args[0], node.meta["val"]
    return node.target is aten.cat.default or source.meta["val"].stride() != have.stride()


def test_training_saves_no_more_than_torch_compile(monkeypatch):
    leave_custom_ops(monkeypatch)
    model, ids = llama(2).train(), tokens()
    saved = []
    for harness in (Harness(), Stock()):
        harness.train(model, ids, labels=ids, use_cache=False)
        saved.append(harness.saved_bytes())
    assert saved[0] < saved[1]
