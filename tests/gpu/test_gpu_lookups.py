# SPDX-License-Identifier: Apache-2.0
"""The gradient of an embedding table on a GPU, where places of one token are added by atomics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from layers import compiled
from torch import nn
from torch._dynamo.utils import counters

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]

V, D, T = 4096, 256, 1024


class Tied(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.table = nn.Parameter(torch.randn(V, D))
        self.inner, self.tied = nn.Linear(D, D, bias=False), tied

    def forward(self, tokens):
        x = self.inner(F.embedding(tokens, self.table))
        return F.linear(x, self.table) if self.tied else x


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("words", [3, 50, V])
def test_rows_of_one_token_are_added_once(tied, words):
    """As exact as torch.compile, which adds in float32 and rounds once, however often a token
    stands: a place that were added twice, or lost, would be off by far more."""
    torch.manual_seed(0)
    exact = Tied(tied).cuda().double()
    model = Tied(tied).cuda().bfloat16()
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(words, (1, T), device="cuda")

    def gradient(call, own):
        y = call(tokens)
        torch.manual_seed(1)
        up = torch.randn(y.shape, device="cuda").to(y.dtype)
        return torch.autograd.grad(y, [own.table], up)[0].double()

    torch.manual_seed(1)
    ours = gradient(compiled(model, gate="always"), model)
    assert counters["coda"]["embedding_backward"] == 1
    torch._dynamo.reset()
    theirs = gradient(torch.compile(model), model)
    y = exact(tokens)
    torch.manual_seed(1)
    up = torch.randn(y.shape, device="cuda").bfloat16().double()
    want = torch.autograd.grad(y, [exact.table], up)[0]
    assert (ours - want).norm() <= 1.2 * (theirs - want).norm()
