# SPDX-License-Identifier: Apache-2.0
"""The planner of memory knows that gradients die at their update; callers that would read a used
gradient, in ways other than a plain loop, get an error."""

import copy

import pytest
import torch
from torch import nn

import coda_inductor
from coda_inductor import optim
from coda_inductor.optim import in_backward

WIDTH, LAYERS = 64, 6


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.sin(layer(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def _own_graphs():
    yield
    optim._OWNERS.clear()


def trained(model, x, options, within):
    """(weights after two steps, the predicted peak) of a copy of ``model``."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if within:
        in_backward(optimizer)
    model.compile(backend="coda", options=options)
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), coda_inductor.reports()[-1].memory.peak


@pytest.mark.parametrize("share", [0.9, 0.3])
def test_a_plan_has_the_same_weights_and_no_room_for_all_gradients(share, without_code):
    model, x = Stack(), torch.randn(4, WIDTH)  # gradients are larger than what is kept
    kept, peak = trained(model, x, {"memory": share}, within=False)
    updated, less = trained(model, x, {"memory": share}, within=True)
    for one, other in zip(updated, kept, strict=True):
        assert torch.equal(one, other)
    weight = 4 * WIDTH * WIDTH
    assert peak - less >= (LAYERS - 2) * weight


def test_a_scaler_and_a_closure_are_errors(without_code):
    model, x = Stack(), torch.randn(4, WIDTH)
    optimizer = in_backward(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    model.compile(backend="coda")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x)).backward()
    with pytest.raises(RuntimeError, match="already used"):
        scaler.step(optimizer)
    optimizer.zero_grad()

    def closure():
        loss = model(x)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="already used"):
        optimizer.step(closure)
