# SPDX-License-Identifier: Apache-2.0
"""Models that are no Llama: what fits is fused, the rest compiles, everything agrees with eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import Harness
from torch import nn

D = 32


class GPTBlock(nn.Module):
    """LayerNorm, biased projections, causal attention, GELU: nothing here is an RMSNorm."""

    def __init__(self, approximate: str):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.gelu = nn.GELU(approximate)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GemmaLike(nn.Module):
    """Norms with 1 + w in front of and behind GEMMs, GELU gate, capped logits."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.first, self.down = nn.Linear(D, D, bias=False), nn.Linear(48, D, bias=False)
        self.gate, self.up = nn.Linear(D, 48, bias=False), nn.Linear(D, 48, bias=False)
        self.head = nn.Linear(D, 80, bias=False)

    @staticmethod
    def norm(x, w):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + w.float())).type_as(x)

    def forward(self, x):
        x = self.first(x)
        h = self.norm(x, self.w1)
        x = x + self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return 30.0 * torch.tanh(self.head(self.norm(x, self.w2)) / 30.0)


def check(model, x, dynamic=None, tolerance=1e-5) -> Harness:
    harness = Harness()
    ours = harness.run(model, x, dynamic=dynamic)
    with torch.no_grad():
        eager = model(x)
    error = (ours.double() - eager.double()).norm() / eager.double().norm()
    assert error < tolerance
    return harness


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gpt_block(approximate, dynamic):
    """In float64: LayerNorms of float32 models are left alone."""
    model = nn.Sequential(GPTBlock(approximate), GPTBlock(approximate)).double()
    harness = check(model, torch.randn(2, 7, D, dtype=torch.float64), dynamic)
    fused = {site.site.split(".")[-1]: site.absorbed for site in harness.fused}
    # Two projections with a residual in each of the two blocks; every norm but the first, whose
    # input no GEMM makes, and the activation behind a norm's GEMM.
    assert harness.counts == {"residual": 4, "layer_norm": 3}
    assert ("erf" if approximate == "none" else "tanh") in fused["up"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gemma_like_block(dtype):
    torch.manual_seed(1)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    harness = check(GemmaLike().to(dtype), torch.randn(2, 7, D, dtype=dtype), tolerance=tolerance)
    assert harness.counts == {"rms_norm": 2, "residual": 1}
    (head,) = [site for site in harness.fused if site.site.endswith("head")]
    assert {"tanh", "mul", "div"} <= set(head.absorbed)
    (pair,) = [site for site in harness.fused if site.program.paired]
    assert "tanh" in pair.absorbed


def test_convolution_and_batched_products_have_no_gemm_site():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(D, D, 3, padding=1)

        def forward(self, x):
            y = self.conv(x.transpose(1, 2))
            return torch.relu(y @ x) + 1

    assert check(Model(), torch.randn(2, D, D)).report.sites == []
