# SPDX-License-Identifier: Apache-2.0
"""Residual streams that do not lie row by row are copied once, where they begin."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from torch import nn

D = 16


class Stream(nn.Module):
    """Pre-norm layers over (T, B, D), whose input lies in memory as (B, T, D), as ESM-2's."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(D) for _ in range(3)])
        self.linears = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x):
        x = x.transpose(0, 1)
        for norm, linear in zip(self.norms[:2], self.linears[:2], strict=True):
            x = x + linear(F.gelu(linear(norm(x))))
        return self.linears[2](self.norms[2](x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_stream_of_sequences_beside_each_other(dynamic):
    x, run = randn(3, 64, D).requires_grad_(not dynamic), check if dynamic else check_gradients
    assert run(Stream().double(), x, dynamic=dynamic).counts["residual"] == 2


@pytest.mark.usefixtures("without_code")
def test_what_is_written_to_an_input_reaches_the_caller():
    """Inductor keeps such writes in the graph, where a copy of the input took them."""

    def function(x):
        y = x + F.linear(F.layer_norm(x, (D,)), w)
        y = y + F.linear(F.layer_norm(y, (D,)), w)
        x.mul_(2)
        return F.linear(F.layer_norm(y, (D,)), w)

    w, ours = randn(D, D), randn(3, 64, D).transpose(0, 1)
    eagers = ours.clone(memory_format=torch.preserve_format)
    found = torch.compile(function, backend="coda", options={"gate": "always"})(ours)
    torch.testing.assert_close(found, function(eagers), rtol=1e-10, atol=1e-10)
    assert torch.equal(ours, eagers)


def test_a_slice_and_a_repeated_row_are_read_where_they_are():
    def function(x, w):
        for _ in range(2):
            y = x + F.linear(F.rms_norm(x, (D,)), w)
        return F.linear(F.rms_norm(y, (D,)), w) + F.rms_norm(x, (D,)).exp()

    for x in (randn(3, 64, 2 * D)[..., :D], randn(1, 64, D).expand(3, 64, D)):
        harness = check(function, x, randn(D, D), dynamic=True)
        assert not harness.ops()["aten.clone.default"]
