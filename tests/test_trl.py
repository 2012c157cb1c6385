# SPDX-License-Identifier: Apache-2.0
"""TRL's head is operations of the graph while the model is compiled: equal results, one epilogue.

A stand-in has TRL's form: a forward that was put on the model, which calls an autograd function
that is a name of its module."""

import functools
import inspect
import types

import pytest
import torch
import torch.nn.functional as F
from checking import count_as_large
from torch import nn
from torch._dynamo.utils import counters

from coda_inductor.trl import Head, open_head

V, D = 300, 16
EVERYTHING = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
calls = []


class _ChunkedLogProbFunction(torch.autograd.Function):
    """Log-probabilities and entropies of tokens."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk, cap, scale, outputs):
        calls.append(chunk)
        z = F.linear(hidden, weight, bias) * scale
        z = (z if cap is None else cap * torch.tanh(z / cap)) / temperature
        logs = F.log_softmax(z, -1)
        p, largest = logs.exp(), z.max(-1).values
        chosen = z.gather(-1, targets[:, None])[:, 0]
        found = {
            "entropy": -(p * logs).sum(-1), "log_sum_sq_probs": (p * p).sum(-1).log(),
            "mean_logits": z.mean(-1), "is_top1": chosen == largest,
        }  # fmt: skip
        first = logs.gather(-1, targets[:, None])[:, 0]
        return (first, *(x if name in outputs else None for name, x in found.items()))


class Model(nn.Module):
    """A body and a head, which may have a bias."""

    def __init__(self, bias=False):
        super().__init__()
        self.body, self.lm_head = nn.Linear(D, D), nn.Linear(D, V, bias=bias)

    def forward(self, x):
        return self.lm_head(torch.tanh(self.body(x)))


def give_head(model, temperature=1.0, cap=None, scale=1.0, outputs=EVERYTHING):
    plain = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, x, labels=None, *, fused=False):
        if not fused:
            return plain(x)
        hidden = torch.tanh(self.body(x)).flatten(0, 1)
        head = self.lm_head
        how = temperature, 32, cap, scale, outputs
        found = _ChunkedLogProbFunction.apply(
            hidden, head.weight, head.bias, labels.flatten(), *how
        )
        return [y for y in found if y is not None]

    model.forward = types.MethodType(forward, model)
    return model


@pytest.fixture(autouse=True)
def small(monkeypatch, without_code):
    count_as_large(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    calls.clear()


def batch():
    return torch.randn(2, 6, D), torch.randint(V, (2, 6))


@pytest.mark.parametrize(("bias", "how"), [
    (True, {"cap": 2.0, "scale": 0.5, "temperature": 0.7}), (False, {"outputs": ("entropy",)}),
], ids=["all", "entropy"])  # fmt: skip
def test_an_opened_head_gives_the_same(bias, how):
    torch.manual_seed(0)
    model, (x, labels) = give_head(Model(bias), **how), batch()
    want = model(x, labels, fused=True)
    before = model.forward
    undo = open_head(nn.Sequential(nn.Identity(), model))
    assert inspect.signature(model.forward) == inspect.signature(before)
    model.compile(backend="coda", options={"reference": True, "strict": True}, fullgraph=True)
    have = model(x, labels, fused=True)
    assert len(calls) == 1  # by ``want``
    torch.testing.assert_close(have, want)
    assert counters["coda"]["cross_entropy"] == counters["coda"]["entropy"] == 1
    torch.testing.assert_close(model(x), model.lm_head(torch.tanh(model.body(x))))
    if not bias:
        assert_same_gradients(model, have, x, labels)
    undo()
    assert model.forward is before


def test_a_head_is_opened_within_wrappers_of_accelerate():
    """As ``Accelerator.prepare_model`` puts them around a forward, for bf16."""
    utils = pytest.importorskip("accelerate.utils")
    model, (x, labels) = give_head(Model(), outputs=()), batch()
    cast = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(utils.convert_outputs_to_fp32(cast), model)
    before, want = model.forward, model(x, labels, fused=True)
    model.compile(backend="coda", options={"reference": True, "strict": True}, fullgraph=True)
    undo = open_head(model)
    have = model(x, labels, fused=True)
    assert len(calls) == 1  # by ``want``
    torch.testing.assert_close(have, want, rtol=0, atol=5e-2)
    assert counters["coda"]["cross_entropy"] == 1
    undo()
    assert model.forward is before


def assert_same_gradients(model, have, x, labels):
    """Of log-probabilities and entropies, which the stand-in has no backward pass for."""
    plain = Model.forward(model, x).flatten(0, 1).log_softmax(-1)
    chosen = plain.gather(-1, labels.flatten()[:, None])[:, 0]
    found = []
    for logs, entropy in (have, (chosen, -(plain.exp() * plain).sum(-1))):
        loss = (logs * torch.arange(12) - 0.5 * entropy).mean()
        found.append(torch.autograd.grad(loss, [*model.parameters()]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_callback_opens_it_while_it_trains(sharded, monkeypatch):
    """Not where it compiles blocks alone: the head would run uncompiled, with all its logits."""
    ours = pytest.importorskip("coda_inductor.transformers")
    monkeypatch.setattr(ours, "_under_ddp", lambda _: False)
    model = give_head(Model())
    if sharded:
        monkeypatch.setattr(ours, "FSDPModule", nn.Linear)
    before, callback = model.forward, ours.CodaCallback(options={"reference": True})
    asked = types.SimpleNamespace(use_cache=False, torch_compile=False)
    callback.on_train_begin(asked, model=model)
    assert (model.forward is before) == sharded
    callback.on_train_end()
    assert model.forward is before


def test_other_models_stay():
    for model in (Model(), other := Model()):
        assert open_head(model) is None
        other.forward = lambda x: x


def test_first_of_equal_logits_is_the_token():
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [1.0], [1.0]])
    found = Head.apply(hidden, weight, None, torch.tensor([1, 2]), 1.0, 8, None, 1.0, ("is_top1",))
    assert found[4].tolist() == [True, False]
