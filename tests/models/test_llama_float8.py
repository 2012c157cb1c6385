# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Llama after torchao's convert_to_float8_training: what fires follows from the
number of layers, and its gradients are as close to float32's as torchao's own."""

from __future__ import annotations

import copy

import torch
from float8 import convert, products
from harness import Harness, Stock
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, VOCABULARY = 1, 256
ALL = {"gate": "always", "reference": True}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16()


def not_the_head(_, name):
    return "lm_head" not in name


def step(model, function, ids):
    """The loss and all gradients."""
    torch._dynamo.reset()
    loss = function(ids, labels=ids).loss
    loss.backward()
    return loss.item(), [p.grad.float() for p in model.parameters()]


def error(have, want):
    square = sum((a - b).norm() ** 2 for a, b in zip(have, want, strict=True))
    return (square / sum(b.norm() ** 2 for b in want)).sqrt().item()


def test_a_training_step():
    ids = torch.randint(0, VOCABULARY, (2, 32))
    true = copy.deepcopy(llama()).float()
    loss, want = step(true, true, ids)
    found = {}
    for backend in (Harness(**ALL), Stock()):
        model = convert(llama(), "rowwise", not_the_head)
        found[backend] = step(model, torch.compile(model, backend=backend), ids)
    (harness, (ours, have)), (_, (theirs, other)) = found.items()
    assert abs(ours - loss) < 2 * abs(theirs - loss) + 1e-3
    assert 0 < error(have, want) < 1.1 * error(other, want)
    linears = 7 * LAYERS
    fired = harness.record.fired + torch._dynamo.utils.counters["coda"]
    assert fired["fp8_product"] == products("rowwise", linears)
    assert fired["rms_norm"] == 2 * LAYERS  # the last one too, whose product is in 16 bits
    assert fired["swiglu"] == LAYERS
    down = [s for s in harness.fused if s.site.endswith("mlp.down_proj") and s.role == "forward"]
    assert len(down) == LAYERS
    assert "amax" in down[0].absorbed
