# SPDX-License-Identifier: Apache-2.0
"""Stock Hugging Face models on the batches that people train on: padded, packed, with a window.
Each layer's attention skips what the mask hides, and the numbers are eager's."""

import copy

import pytest
import torch
from checking import assert_same
from harness import Harness

from coda_inductor.dynamo.attention import block_masks

transformers = pytest.importorskip("transformers")

LAYERS, T = 2, 160


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


def step(function, model, batch):
    loss = function(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


#: Layers that have a window or none, and a mask each.
GEMMA = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("name", "settings", "batch", "masks"),
    [("Llama", {}, packed, 1), ("Llama", {}, padded, 1), ("Gemma3", GEMMA, padded, 2)],
)
def test_attention_skips_what_a_mask_hides(name, settings, batch, masks):
    """``masks`` have lists of their blocks made, four scatters each. Loss and gradients are
    eager's up to Hugging Face's own float32. Whatever the positions, also where each row has its
    own, projections rotate by them."""
    given, made = batch(), model(name, **settings)
    if name == "Llama" and batch is packed:
        made.gradient_checkpointing_enable()
    elif name == "Llama":
        given["position_ids"] = given["attention_mask"].cumsum(-1).sub(1).clamp(min=0)
    else:  # of a number on a CPU torch makes a constant, and Dynamo begins anew
        embed = made.get_input_embeddings()
        embed.embed_scale = embed.embed_scale[None]
    ours, harness = copy.deepcopy(made), Harness(gate="always")
    have = step(torch.compile(ours, backend=harness, dynamic=False), ours, given)
    assert_same(have, step(made, made, given), 2e-6)
    assert harness.graphs == 1
    fired = torch._dynamo.utils.counters["coda"]
    assert fired["block_mask"] == fired["grouped_heads"] == LAYERS
    assert sum(n.target == "scatter" for n in harness.raised.nodes) == 4 * masks
    if name == "Llama":
        assert fired["rotary"] == 2 * LAYERS
        forward = [site for site in harness.report.sites if site.role == "forward"]
        assert sum(bool(s.program and s.program.head) for s in forward) == 2 * LAYERS
