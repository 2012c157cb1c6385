# SPDX-License-Identifier: Apache-2.0
"""The gradient of returned logits is computed where somebody asks for it, and only there."""

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, randn
from harness import Harness
from zoo.heads import Head, Several

from coda_inductor.dynamo import late_gradients


def loss_of(logits, labels):
    return F.cross_entropy(logits.float().view(-1, 32), labels)


def plain(head, h, labels):
    logits = head(h)
    return loss_of(logits, labels), logits


def causal(end=plain, bias: bool = False, dtype: torch.dtype = torch.float64) -> Head:
    """A causal LM in miniature: the loss, and the logits that it was made of."""
    return Head(None, dtype, bias, width=8, vocabulary=32, end=end)


def capped(head, h, labels):
    """In front of the loss too, as Gemma 2 has them."""
    logits = head(h)
    logits = logits / 0.5
    logits = torch.tanh(logits)
    logits = logits * 0.5
    return loss_of(logits, labels), logits


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)


def run(model, call, use):
    torch.manual_seed(1)
    model.zero_grad()
    x = randn(2, 3, 8).to(next(model.parameters()).dtype).requires_grad_()
    labels = torch.arange(6)
    use(*call(x, labels)).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


USES = {
    "loss": lambda loss, _: loss,
    "logits": lambda _, logits: logits.square().sum(),
    "both": lambda loss, logits: loss + logits.square().sum(),
}


@pytest.mark.parametrize(
    ("end", "bias", "use"),
    [(plain, True, "loss"), (plain, False, "logits"), (capped, True, "both")],
)
def test_gradients_agree_whatever_they_start_from(end, bias, use):
    """And none is made up for the logits: there is one of the loss and of h, (2, 3, 8)."""
    model, harness = causal(end, bias), Harness()
    ours = run(model, torch.compile(model, backend=harness), USES[use])
    # The loss is float32, as the idiom says.
    assert_same(ours, run(model, model, USES[use]), 1e-6)
    given = [n for n in harness.graph.nodes if n.op == "placeholder" and "tangents" in n.name]
    assert sorted(tuple(n.meta["val"].shape) for n in given) == [(), (2, 3, 8)]


def changed_before_its_cap(head, h, labels):
    logits = head(h)
    logits[:, :1].mul_(2)
    logits = 2 * torch.tanh(logits / 2)
    return loss_of(logits, labels), logits


def changed_cap(head, h, labels):
    logits = 2 * torch.tanh(head(h) / 2)
    logits.mul_(2)
    return loss_of(logits, labels), logits


def capped_by_a_tensor(head, h, labels):
    logits = torch.tanh(head(h) / (cap := h.detach().abs().amax())) * cap
    return loss_of(logits, labels), logits


def bent_cap(head, h, labels):
    bent = 2 * torch.tanh((logits := head(h)) / 3)
    return loss_of(logits, labels) + bent.sum(), bent


def only_logits(head, h, labels):
    return labels.sum().double(), head(h)


OTHERS = (changed_before_its_cap, changed_cap, capped_by_a_tensor, bent_cap, only_logits)


def test_other_outputs_keep_their_gradient(monkeypatch):
    model, calls, wrap = Several(map(causal, OTHERS)), [], late_gradients._wrap
    monkeypatch.setattr(late_gradients, "_wrap", lambda *a: calls.append(a) or wrap(*a))

    def use(*results):
        return sum(logits.square().sum() for _, logits in results)

    ours = run(model, torch.compile(model, backend=Harness()), use)
    assert not calls
    assert_same(ours, run(model, model, use), 1e-6)


def test_a_returned_view_of_the_logits_keeps_its_gradient():
    """They are made of each other, so that both keep the gradient that torch gives them."""

    def end(head, h, labels):
        logits = head(h)
        return logits[0], logits, loss_of(logits, labels)

    def use(seen, logits, _):
        return seen.sin().sum() + logits.square().sum()

    model = causal(end)
    ours = run(model, torch.compile(model, backend=Harness()), use)
    assert_same(ours, run(model, model, use))


def test_logits_changed_in_place_are_noticed():
    model, x = causal(dtype=torch.float32), randn(2, 3, 8, dtype=torch.float32)
    loss, logits = torch.compile(model, backend=Harness())(x, torch.arange(6))
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_that_the_loss_does_not_need_may_be_changed():
    model, x = causal(lambda head, h, _: ((logits := head(h)).mean(), logits)), randn(6, 8)
    want = torch.autograd.grad(model(x, None)[0], [*model.parameters()])
    loss, logits = torch.compile(model, backend=Harness())(x, None)
    with torch.no_grad():
        logits.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(loss, [*model.parameters()]), want)
