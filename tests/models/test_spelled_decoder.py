# SPDX-License-Identifier: Apache-2.0
"""A small decoder whose parts are spelled by hand: what fires follows from the number of layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check_gradients
from torch import nn

D, H, V, B, T, EPS = 16, 24, 32, 2, 5, 1e-5


class Norm(nn.Module):
    def __init__(self, spelling):
        super().__init__()
        self.weight, self.spelling = nn.Parameter(torch.rand(D) + 0.5), spelling

    def forward(self, x):
        return self.spelling(x, self.weight)


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norms = nn.ModuleList(Norm(norm) for _ in range(2))
        self.mix, self.out, self.down = (nn.Linear(n, D, bias=False) for n in (D, D, H))
        self.gate, self.up = (nn.Linear(D, H, bias=False) for _ in range(2))

    def forward(self, x):
        y = self.out(torch.tanh(self.mix(self.norms[0](x))))
        y += x
        n = self.norms[1](y)
        return self.down(F.silu(self.gate(n)).mul_(self.up(n))).add_(y)


class Decoder(nn.Module):
    def __init__(self, layers, norm, loss):
        super().__init__()
        self.table, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers = nn.Sequential(*(Layer(norm) for _ in range(layers)))
        self.norm, self.loss = Norm(norm), loss

    def forward(self, tokens):
        return self.loss(self.head(self.norm(self.layers(self.table(tokens)))), tokens)


def over_width(x, w):
    return w * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / x.size(-1) + EPS)


def in_place(x, w):
    return w * (x * torch.mean(x * x, dim=-1).add_(EPS).rsqrt_().unsqueeze(-1))


def shifted(z, tokens):
    rows, labels = z[..., :-1, :].contiguous(), tokens[..., 1:].contiguous()
    return F.cross_entropy(rows.view(-1, V), labels.view(-1))


def difference(z, tokens):
    picked = z.gather(-1, tokens[..., None]).squeeze(-1)
    return (torch.logsumexp(z, -1) - picked).mean()


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("norm", "loss"), [(over_width, shifted), (in_place, difference)])
def test_counts_follow_from_the_layers(norm, loss, layers):
    model = Decoder(layers, norm, loss).double()
    counts = check_gradients(model, torch.randint(0, V, (B, T))).counts
    # The first norm reads a lookup; in its place the last one is deferred.
    for name in ("rms_norm", "rms_norm_backward"):
        assert counts[name] == 2 * layers
    assert counts["swiglu"] == counts["swiglu_backward"] == layers
    assert counts["cross_entropy"] == 1
