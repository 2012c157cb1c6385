# SPDX-License-Identifier: Apache-2.0
"""Stock Hugging Face models on the batches that people train on: padded, packed, with a window.
Each layer's attention skips what the mask hides, and the numbers are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from checking import assert_same
from harness import Harness

from coda_inductor.dynamo.attention import block_masks

transformers = pytest.importorskip("transformers")

LAYERS, T = 2, 160
flex = torch.ops.higher_order.flex_attention


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(block_masks, "DEVICE", "cpu")
    monkeypatch.setattr(block_masks, "DTYPES", (torch.float64,))


def model(name, **settings):
    config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
        "max_position_embeddings": T, "use_cache": False, "head_dim": 16,
        "attn_implementation": "sdpa", "pad_token_id": 0,
    }  # fmt: skip
    made = getattr(transformers, f"{name}ForCausalLM")(config(**sizes, **settings))
    return made.double().train()


def tokens(batch=1):
    return torch.randint(1, 64, (batch, T))


def packed():
    """Three documents in one row, of which the positions begin anew."""
    positions = torch.cat([torch.arange(n) for n in (30, 100, T - 130)])[None]
    return {"input_ids": tokens(), "position_ids": positions}


def padded():
    """On the left: the padding's own queries see nothing."""
    mask = (torch.arange(T) >= torch.tensor([[0], [140], [9]])).long()
    return {"input_ids": tokens(3), "attention_mask": mask}


def plain():
    return {"input_ids": tokens(2)}


def step(function, model, batch):
    loss = function(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def compare(model, batch):
    """Loss and all gradients, up to Hugging Face's own float32; returns what was compiled."""
    ours, harness = copy.deepcopy(model), Harness(gate="always")
    have = step(torch.compile(ours, backend=harness, dynamic=False), ours, batch)
    assert_same(have, step(model, model, batch), 2e-6)
    return harness


def counts(harness):
    """How often each rewrite fired in a graph; Dynamo hands us Gemma's twice."""
    return {
        name: times / harness.graphs
        for name, times in torch._dynamo.utils.counters["coda"].items()
        if name in ("block_mask", "constant_mask", "grouped_heads")
    }


def lists(harness):
    """How many masks have theirs made, four sorts each."""
    return sum(n.target == "argsort" for n in harness.raised.nodes) / 4


@pytest.mark.parametrize(
    ("name", "batch"), [("Llama", packed), ("Llama", padded), ("Qwen3", padded)]
)
def test_padded_and_packed(name, batch):
    harness = compare(model(name), batch())
    assert counts(harness) == {"block_mask": LAYERS, "grouped_heads": LAYERS}
    assert lists(harness) == 1


@pytest.mark.parametrize("batch", [packed, padded])
def test_positions_that_begin_anew_are_rotated_in_the_projections(batch):
    """Whatever the positions, and whether each row of the batch has its own."""
    given = batch()
    if "attention_mask" in given:
        given["position_ids"] = given["attention_mask"].cumsum(-1).sub(1).clamp(min=0)
    harness = compare(model("Llama"), given)
    assert torch._dynamo.utils.counters["coda"]["rotary"] == 2 * LAYERS
    forward = [site for site in harness.report.sites if site.role == "forward"]
    rotated = [site.site for site in forward if site.program and site.program.head]
    assert len(rotated) == 2 * LAYERS, rotated


@pytest.mark.parametrize("batch", [plain, packed])
def test_sliding_windows(batch):
    harness = compare(model("Mistral", sliding_window=40), batch())
    assert counts(harness) == {"block_mask": LAYERS, "grouped_heads": LAYERS}
    assert lists(harness) == 1


def test_two_kinds_of_layers():
    """Gemma 3's have a window or none, and a mask each."""
    types = ["sliding_attention", "full_attention"]
    gemma = model("Gemma3", sliding_window=40, layer_types=types)
    harness = compare(gemma, padded())
    assert counts(harness) == {"block_mask": LAYERS, "grouped_heads": LAYERS}
    assert lists(harness) == 2


def test_without_padding_only_windows_are_left():
    types = ["sliding_attention", "full_attention"]
    harness = compare(model("Gemma3", sliding_window=40, layer_types=types), plain())
    assert counts(harness) == {"block_mask": 1, "constant_mask": 1, "grouped_heads": 1}
    assert lists(harness) == 1


def test_checkpointed_layers():
    llama = model("Llama")
    llama.gradient_checkpointing_enable()
    harness = compare(llama, packed())
    assert counts(harness) == {"block_mask": LAYERS, "grouped_heads": LAYERS}
    assert lists(harness) == 1
