# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Llama, unmodified: what its kernels read, and what lies around attention.

The input norm of the first layer stays: its input is an embedding, not a GEMM's product. In its
place the final norm is deferred, so that L layers defer 2 L norms.
"""

from __future__ import annotations

import copy

import torch
from harness import Harness, Stock
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128
aten = torch.ops.aten
CONCATENATIONS = (aten.cat.default, torch.ops.coda_inductor.columns.default)


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


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
            n for n in harness.graph.nodes if n.target in (aten.clone.default, *CONCATENATIONS)
        ]
        large = [
            n for n in copies if n.meta["val"].numel() >= ids.numel() * model.config.hidden_size
        ]
        found.append(sum(map(lays_out_anew, large)))
    # Queries' and keys' of each layer: halves, and rows of the gradient.
    assert found == [2, 2 * 2 * 2]


def lays_out_anew(node) -> bool:
    source, have = node.args[0], node.meta["val"]
    return node.target in CONCATENATIONS or source.meta["val"].stride() != have.stride()
