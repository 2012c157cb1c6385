# SPDX-License-Identifier: Apache-2.0
"""The gradient of returned logits is computed where somebody asks for it, and only there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, randn
from harness import Harness
from torch import nn

from coda_inductor.dynamo import late_gradients


class Head(nn.Module):
    """A causal LM in miniature: the loss, and the logits that it was made of."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 32, bias, dtype=dtype)

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x)))
        loss = F.cross_entropy(logits.float().view(-1, 32), labels)
        return self.pick(loss, logits)

    @staticmethod
    def pick(loss, logits):
        return loss, logits


class Biased(Head):
    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__(True, dtype)


class Capped(Biased):
    """Logits that are soft-capped, in front of the loss too, as Gemma 2 has them."""

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x)))
        logits = logits / 0.5
        logits = torch.tanh(logits)
        logits = logits * 0.5
        return F.cross_entropy(logits.float().view(-1, 32), labels), logits


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)


def run(model, call, use):
    """Gradients of a backward pass from ``use(loss, logits)``."""
    model.zero_grad()
    x = randn(2, 3, 8).to(next(model.parameters()).dtype).requires_grad_()
    labels = torch.arange(6)
    use(*call(x, labels)).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def tangents(harness: Harness) -> int:
    return sum("tangents" in n.name for n in harness.graph.nodes if n.op == "placeholder")


USES = {
    "loss": lambda loss, _: loss,
    "logits": lambda _, logits: logits.square().sum(),
    "both": lambda loss, logits: loss + logits.square().sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [Head, Biased, Capped])
def test_gradients_agree_whatever_they_start_from(kind, use):
    model, harness = kind(), Harness()
    torch.manual_seed(1)
    ours = run(model, torch.compile(model, backend=harness), USES[use])
    torch.manual_seed(1)
    # The loss is float32, as the idiom says.
    assert_same(ours, run(model, model, USES[use]), 1e-6)


@pytest.mark.parametrize("kind", [Head, Biased, Capped])
def test_no_gradient_is_made_up_for_the_logits(kind):
    harness, model = Harness(), kind()
    run(model, torch.compile(model, backend=harness), USES["loss"])
    inputs = [n for n in harness.graph.nodes if n.op == "placeholder"]
    shapes = [tuple(n.meta["val"].shape) for n in inputs if "tangents" in n.name]
    assert sorted(shapes) == [(), (2, 3, 8)]  # the loss and h; not (2, 3, 32)


class OnlyLogits(Head):
    def forward(self, x, labels):
        return labels.sum().double(), self.head(torch.tanh(self.body(x)))


class Bent(Head):
    @staticmethod
    def pick(loss, logits):
        return loss, torch.tanh(logits)


class BentCap(Head):
    @staticmethod
    def pick(loss, logits):
        bent = 2 * torch.tanh(logits / 3)
        return loss + bent.sum(), bent


class ChangedBeforeItsCap(Head):
    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x)))
        logits[:, :1].mul_(2)
        logits = 2 * torch.tanh(logits / 2)
        return F.cross_entropy(logits.float().view(-1, 32), labels), logits


class ChangedByName(Head):
    def forward(self, x, labels):
        h = torch.tanh(self.body(x))
        logits = F.linear(input=h, weight=self.head.weight)
        logits.mul_(2)
        return F.cross_entropy(logits.float().view(-1, 32), labels), logits


class ChangedCap(Head):
    def forward(self, x, labels):
        logits = 2 * torch.tanh(self.head(torch.tanh(self.body(x))) / 2)
        logits.mul_(2)
        return F.cross_entropy(logits.float().view(-1, 32), labels), logits


@pytest.mark.parametrize(
    "kind", [OnlyLogits, Bent, BentCap, ChangedBeforeItsCap, ChangedByName, ChangedCap]
)
def test_other_outputs_keep_their_gradient(kind):
    harness, model = Harness(), kind()
    calls = []
    wrap = late_gradients._wrap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_gradients, "_wrap", lambda *a: calls.append(a) or wrap(*a))
        torch.manual_seed(1)
        ours = run(model, torch.compile(model, backend=harness), USES["logits"])
    assert not calls
    torch.manual_seed(1)
    for have, want in zip(ours, run(model, model, USES["logits"]), strict=True):
        assert (have is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(have, want)


@pytest.mark.parametrize("view", [lambda y: y.flatten(0, -2), lambda y: y[0], lambda y: y])
def test_a_returned_view_of_the_logits_keeps_its_gradient(view):
    """They are made of each other, so that both keep the gradient that torch gives them."""
    models = Head(), Head()
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, harness in zip(models, (None, Harness()), strict=True):
        model.pick = lambda loss, logits: (view(logits), logits, loss)
        call = model if harness is None else torch.compile(model, backend=harness)
        torch._dynamo.reset()
        torch.manual_seed(0)
        found.append(run(model, call, lambda v, y, _: v.sin().sum() + y.square().sum()))
    for want, have in zip(*found, strict=True):
        torch.testing.assert_close(have, want)


def test_small_logits_are_left_alone(monkeypatch):
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 2 * 3 * 32 * 8 + 1)
    harness, model = Harness(), Head()
    run(model, torch.compile(model, backend=harness), USES["loss"])
    assert tangents(harness) == 2
    assert "detach" not in [n.target for n in harness.raised.nodes]


def test_frozen_head_and_input():
    model = Head()
    model.head.weight.requires_grad_(False)
    ours = copy.deepcopy(model)
    x, labels = randn(2, 3, 8), torch.arange(6)
    for m, call in ((ours, torch.compile(ours, backend=Harness())), (model, model)):
        loss, logits = call(x, labels)
        (loss + logits.sum()).backward()
        assert m.head.weight.grad is None
    torch.testing.assert_close(ours.body.weight.grad, model.body.weight.grad)


def test_logits_changed_in_place_are_noticed():
    model, x = Head(dtype=torch.float32), randn(2, 3, 8, dtype=torch.float32)
    loss, logits = torch.compile(model, backend=Harness())(x, torch.arange(6))
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Mean(Head):
    """A loss whose gradient does not read the logits."""

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x)))
        return logits.mean(), logits


@pytest.mark.parametrize("backend", ["eager", "inductor", "coda"])
def test_logits_that_the_loss_does_not_need_may_be_changed(backend):
    """As in eager and in torch.compile."""
    torch.manual_seed(0)
    model, x = Mean(), randn(6, 8)
    want = torch.autograd.grad(model(x, None)[0], [*model.parameters()])
    torch._dynamo.reset()
    loss, logits = torch.compile(model, backend=backend)(x, None)
    with torch.no_grad():
        logits.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(loss, [*model.parameters()]), want)
