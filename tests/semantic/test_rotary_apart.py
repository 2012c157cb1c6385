# SPDX-License-Identifier: Apache-2.0
"""Rotations of neighbouring pairs whose result stands as halves (DeepSeek-V3): raised, equal, and
left to Inductor."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from checking import check, check_gradients, raised, randn
from harness import Harness
from passes import codes

from coda_inductor.semantic.rotary import rotate, rotate_apart

B, T, H, D = 2, 5, 3, 8


def interleave(x, cos, sin):
    """As in transformers 5.23, of tables with one angle a pair."""
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def viewed(x, cos, sin):
    """As before that, and in DeepSeek's own: tables of all columns, in the result's order."""
    b, h, s, d = x.shape
    x = x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def halves(x, cos, sin):
    """What is not put apart."""
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def inputs(dtype=torch.float64, rows=(1, T)):
    """Tables that are no rotations: what holds is to hold whatever they are."""
    x = randn(B, H, T, D, dtype=dtype).requires_grad_()
    return x, randn(*rows, D, dtype=dtype), randn(*rows, D, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("spelling", [interleave, viewed])
def test_fires_and_agrees(spelling, dtype):
    harness = check_gradients(spelling, *inputs(dtype))
    assert raised(harness, rotate_apart) == 1
    assert not raised(harness, rotate)
    left = {getattr(n.target, "__name__", "") for n in harness.raised.nodes}
    assert not {"cat", "sub", "neg"} & left


def test_a_copy_of_halves_is_no_pair():
    """Halves as a matrix that is transposed are pairs: the other way round."""

    def together(x, cos, sin):
        return halves(x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), cos, sin)

    def other_dimensions(x, cos, sin):
        turned = x.unflatten(-1, (-1, 2)).transpose(-2, -3).transpose(-2, -3).flatten(-2)
        return halves(turned, cos, sin)

    for function in (together, other_dimensions):
        harness = check_gradients(function, *inputs())
        assert not raised(harness, rotate_apart)
        assert raised(harness, rotate)


@pytest.mark.parametrize("spelling", [interleave, viewed])
def test_learned_tables_and_such_of_another_width_stay(spelling):
    x, cos, sin = inputs()
    harness = check_gradients(spelling, x, cos.requires_grad_(), sin)
    assert not raised(harness, rotate_apart)
    assert "turns-gradient" in codes(harness)
    harness = check(lambda x, c, s: interleave(x, c[..., :1], s[..., :1]), *inputs())
    assert not raised(harness, rotate_apart)
    assert "rotary-width" in codes(harness)


def test_deepseek():
    config = hf.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=8,
    )  # fmt: skip
    model = hf.DeepseekV3ForCausalLM(config).double().eval()
    ids = torch.randint(0, 64, (2, 12))
    harness = Harness()
    ours = harness.run(lambda ids: model(ids, use_cache=False).logits, ids)
    with torch.no_grad():
        torch.testing.assert_close(ours, model(ids, use_cache=False).logits, rtol=1e-6, atol=1e-6)
    assert raised(harness, rotate_apart) == 2
    assert not harness.counts["rotary"]  # queries are cut out of their projection
