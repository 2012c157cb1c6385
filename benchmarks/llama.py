# SPDX-License-Identifier: Apache-2.0
"""A whole, unmodified Llama of ``transformers`` with random bf16 weights."""

from __future__ import annotations

from typing import Any

import torch

from .measure import device

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def build(size: str, length: int, shape: dict[str, Any] | None = None):
    """A model of shape `size` (or `shape`) in bf16, in evaluation mode, and a function that draws
    token ids.

    The function gives (1, length) int64 ids, other ones at every call. Length is in tokens.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        **(shape or SHAPES[size]),
        tie_word_embeddings=True,
        max_position_embeddings=max(length, 8192),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def tokens() -> torch.Tensor:
        return torch.randint(config.vocab_size, (1, length), device=device())

    return model, tokens
