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
KINDS = ("block_mask", "constant_mask", "grouped_heads")


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


#: Layers that have a window or none, and a mask each.
GEMMA = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(("name", "settings", "batch", "masks"), [
    ("Llama", {}, packed, 1), ("Llama", {}, padded, 1), ("Gemma3", GEMMA, padded, 2),
    ("Gemma3", GEMMA, plain, 1),
])  # fmt: skip
def test_attention_skips_what_a_mask_hides(name, settings, batch, masks):
    """``masks`` have lists of their blocks made, four scatters each; one of causal order is left to
    SDPA. Whatever the positions, also where each row has its own, projections rotate by them."""
    given, made = batch(), model(name, **settings)
    if "attention_mask" in given and name == "Llama":
        given["position_ids"] = given["attention_mask"].cumsum(-1).sub(1).clamp(min=0)
    if batch is packed and name == "Llama":
        made.gradient_checkpointing_enable()
    again = 0
    if settings is GEMMA:  # of a number on a CPU torch makes a constant, and Dynamo begins anew
        again, embed = int(batch is plain), made.get_input_embeddings()
        embed.embed_scale = embed.embed_scale if again else embed.embed_scale[None]
    harness = compare(made, given)
    assert harness.graphs == 1 + again
    fired = torch._dynamo.utils.counters["coda"]
    counts = {name: times / harness.graphs for name, times in fired.items() if name in KINDS}
    constant = {"constant_mask": 1} if settings is GEMMA and batch is plain else {}
    blocks = LAYERS - len(constant)
    assert counts == {"block_mask": blocks, "grouped_heads": blocks, **constant}
    assert sum(n.target == "scatter" for n in harness.raised.nodes) == 4 * masks
    if name == "Llama":
        assert fired["rotary"] == 2 * LAYERS
        forward = [site for site in harness.report.sites if site.role == "forward"]
        assert sum(bool(s.program and s.program.head) for s in forward) == 2 * LAYERS
