# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's gate, as transformers writes it, and of two projections; of clamps at other numbers it
is another function."""

import pytest
import torch
from checking import check_gradients, randn
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

D, F = 16, 24


class Dense(nn.Module):
    """What an expert computes, of all rows."""

    alpha, limit = 1.702, 7.0

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(D, 2 * F).double(), nn.Linear(F, D).double()

    def forward(self, x):
        return self.down(GptOssExperts._apply_gate(self, 9 * self.gate_up(x)))


def raised(harness):
    return sum("clamped_swiglu" in str(n.target) for n in harness.raised.nodes)


def test_it_fires_in_transformers_code():
    assert raised(check_gradients(Dense(), randn(4, D).requires_grad_())) == 1


@pytest.mark.parametrize(("low", "times"), [(-7.0, 1), (-6.0, 0), (7.0, 0)])
def test_two_projections_meet_in_one_kernel(low, times):
    def gated(x, wg, wu, wd):
        gate, up = (9 * (x @ wg)).clamp(max=7.0), (9 * (x @ wu)).clamp(min=low, max=7.0)
        return ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ wd

    shapes = (4, D), (D, F), (D, F), (F, D)
    harness = check_gradients(gated, *(randn(*s).requires_grad_() for s in shapes))
    assert raised(harness) == times
    assert harness.counts["clamped_swiglu"] == harness.counts["clamped_swiglu_backward"] == times
    assert any(site.program.paired for site in harness.fused)
