# SPDX-License-Identifier: Apache-2.0
"""explain leaves no trace: not in the model, not in torch, not in what is compiled already."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import coda_inductor
from coda_inductor import ExplainError, explain


class Counting(nn.Module):
    """Counts its calls, and normalizes with running statistics."""

    def __init__(self, breaks=False, counts=True):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(32)
        self.calls, self.breaks, self.counts = 0, breaks, counts

    def forward(self, x):
        if self.counts:
            self.calls += 1
        h = self.norm(self.first(x)).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(nn.functional.dropout(h, training=self.training))


def compiled(function):
    """``function`` through torch.compile with a backend that notes the shapes it compiles for."""
    shapes = []

    def backend(gm, inputs):
        shapes.append([tuple(x.shape) if isinstance(x, torch.Tensor) else "symbol" for x in inputs])
        return gm.forward

    return torch.compile(function, backend=backend), shapes


@pytest.mark.parametrize("breaks", [False, True])
def test_the_model_and_the_random_state_stay_as_they_are(breaks):
    model = Counting(breaks).train()
    model.first.weight.grad = torch.ones(32, 16)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights, state = list(model.parameters()), torch.get_rng_state()
    found = explain(model, torch.randn(8, 16))
    assert found.gemms >= 4
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(8, 16)  # the argument above was drawn by the test
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.calls == 0
    assert model.training
    assert all(p is q for p, q in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model.first.weight.grad, torch.ones(32, 16))
    assert model.second.weight.grad is None


def test_what_is_compiled_already_is_not_compiled_again():
    model, x = Counting(breaks=True, counts=False).eval(), torch.randn(8, 16)
    run, shapes = compiled(model)
    run(x)
    first = len(shapes)
    explain(model, x)
    run(x)
    assert len(shapes) == first == 2


def test_sizes_seen_do_not_become_dynamic():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    for rows in (8, 24):
        found = explain(model, torch.randn(rows, 16))
        assert found.sites[0].shape == (rows, 32, 16)
    run, shapes = compiled(model)
    run(torch.randn(40, 16))
    assert (40, 16) in shapes[0]
    assert "symbol" not in shapes[0]


def test_counters_and_reports_are_for_what_is_compiled():
    """Options are those of the backend."""
    reports = len(coda_inductor.reports())
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).bfloat16(), torch.randn(8, 16).bfloat16()
    assert explain(model, x, options={"gate": "always"}).fused
    assert not explain(model, x, options={"gate": "never"}).fused
    assert not counters["coda"]
    assert len(coda_inductor.reports()) == reports


def test_a_broken_model_is_explained_as_a_whole():
    model = Counting(breaks=True).eval()
    found = explain(model, torch.randn(8, 16))
    assert len(found.notes) == 2
    assert "graph_break" in found.notes[1].lower()
    assert len(found.sites) == 5  # two forward; one weight's gradient each, one input's


def test_meta_tensors_hold_no_memory_and_are_explained():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.ReLU()), torch.empty(8, 1 << 20)
    with torch.no_grad():
        found = explain(model.bfloat16(), x.bfloat16(), options={"gate": "always"})
    assert found.device == "meta"
    assert found.sites[0].absorbed == ("relu",)


@pytest.mark.parametrize(("model", "says"), [
    (lambda x: 3, "no graph"),
    (lambda x: x @ torch.randn(3, 3), "cannot be traced"),
    ("llama", "takes a module or a function, got str"),
])  # fmt: skip
def test_bad_models_are_clear_errors(model, says):
    with pytest.raises(ExplainError, match=says):
        explain(model, torch.randn(8, 16))
