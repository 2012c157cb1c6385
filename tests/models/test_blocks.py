# SPDX-License-Identifier: Apache-2.0
"""Blocks that are no Hugging Face model, written as their libraries write them: torchtitan's Llama,
a LoRA. Outputs and gradients are eager's, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from torch import nn

D, HEADS, HIDDEN = 32, 4, 48


def precompute_freqs_cis(dim: int, end: int) -> torch.Tensor:
    """torchtitan's, with ``double`` where it says ``float``: nothing is to round here."""
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2).double() / dim))
    freqs = torch.outer(torch.arange(end), freqs).double()
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.double().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.double().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis[: xq.shape[1]].view(1, xq.shape[1], 1, -1)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class TitanBlock(nn.Module):
    """torchtitan's Llama 3 block: complex rotary embedding, ``nn.RMSNorm``, w1, w2, w3."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(D, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, D, bias=False)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(D, eps=1e-5) for _ in range(2))
        self.freqs_cis = precompute_freqs_cis(D // HEADS, 64)  # no buffer: double() would cast it

    def forward(self, x):
        B, T, _ = x.shape
        n = self.attention_norm(x)
        q, k, v = (w(n).view(B, T, HEADS, -1) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rotary_emb(q, k, self.freqs_cis)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + self.wo(y.transpose(1, 2).contiguous().view(B, T, -1))
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class Adapter(nn.Module):
    """LoRA as peft writes it, around a frozen projection, in an MLP with a residual."""

    def __init__(self):
        super().__init__()
        self.base, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.a, self.b = nn.Linear(D, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        z = self.base(x)
        z = z + self.b(self.a(x)) * 2.0
        return x + self.down(F.relu(z).square())


def test_what_fires_in_torchtitans_llama():
    layers = 2
    model = nn.Sequential(*(TitanBlock() for _ in range(layers))).double().train()
    counts = {"rms_norm": 2 * layers - 1, "swiglu": layers, "residual": 2 * layers,
              "rotary": 2 * layers}  # fmt: skip
    assert check(model, randn(2, 8, D)).counts == counts
    harness = check_gradients(model, randn(2, 8, D).requires_grad_())
    for pattern in ("rms_norm", "swiglu"):
        assert harness.counts[pattern] == harness.counts[f"{pattern}_backward"] == counts[pattern]


def test_low_rank_adapter_is_added_on_the_tile():
    harness = check(Adapter().double(), randn(2, 8, D))
    # The adapter's product is scaled in its own epilogue, and a tile operand of the base's.
    assert harness.counts == {"epilogue": 1, "residual": 2}
    (base,) = [site for site in harness.fused if site.shape[1:] == (HIDDEN, D)]
    assert base.absorbed == ("add", "relu", "pow")
    check_gradients(Adapter().double(), randn(2, 8, D).requires_grad_())
