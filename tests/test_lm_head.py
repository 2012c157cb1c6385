# SPDX-License-Identifier: Apache-2.0
"""``token_log_probs``: values and gradients against float64, in eager, in a graph and compiled by
itself; and inputs that it refuses."""

import functools

import pytest
import torch
import torch.nn.functional as F
from checking import count_as_large
from torch._dynamo.utils import counters

from coda_inductor import lm_head, report, reports, token_log_probs

V, K = 300, 16


@pytest.fixture(autouse=True)
def small(monkeypatch, without_code):
    count_as_large(monkeypatch)
    torch._dynamo.reset()
    lm_head._compiled.cache_clear()
    counters.clear()
    report.forget()
    # As large products would: without a kernel, but fused.
    options = {"reference": True, "gate": "always", "strict": True}
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, options=options))


def inputs(dtype=torch.float64, *shape):
    torch.manual_seed(0)
    hidden, weight = torch.randn(*(shape or (2, 6)), K), torch.randn(V, K) / 4
    tensors = [x.to(dtype).requires_grad_() for x in (hidden, weight, torch.randn(V))]
    return *tensors, torch.randint(V, hidden.shape[:-1])


def exact(hidden, weight, bias, targets, temperature=1.0, softcap=None):
    z = hidden.double() @ weight.double().T + bias.double()
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    p = torch.exp(z) / torch.exp(z).sum(-1, keepdim=True)
    chosen = torch.log(p).gather(-1, targets[..., None])[..., 0]
    return chosen, -(p * torch.log(p)).sum(-1)


def gradients(found, tensors):
    factors = torch.arange(found[0].numel()).view(found[0].shape)
    return torch.autograd.grad((found[0] * factors - 0.5 * found[1]).mean(), tensors)


@pytest.mark.parametrize("way", ["eager", "in a graph", "by itself"])
def test_values_and_gradients(way, monkeypatch):
    how = {"softcap": 2.0, "temperature": 0.7}
    *tensors, targets = inputs()
    call = token_log_probs
    if way == "in a graph":
        call = torch.compile(call, backend="coda", fullgraph=True)
    elif way == "by itself":
        monkeypatch.setattr(lm_head, "_compiles", lambda _: True)
    found = call(*tensors[:2], targets, bias=tensors[2], entropy=True, **how)
    want = exact(*tensors, targets, **how)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(gradients(found, tensors), gradients(want, tensors))
    found = [r.combine for g in reports() for s in g.sites if s.fused for r in s.program.reduces]
    assert sorted(found) == ([] if way == "eager" else ["entropy", "logsumexp"])


def test_any_number_of_tokens_is_one_graph(monkeypatch):
    """From the second number on. Without entropies the result is one tensor, in float32."""
    monkeypatch.setattr(lm_head, "_compiles", lambda _: True)
    for n in (5, 7, 9, 12):
        hidden, weight, _, targets = inputs(torch.bfloat16, n)
        with torch.no_grad():
            found = token_log_probs(hidden, weight, targets)
        plain = -F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")
        want, _ = exact(hidden, weight, torch.zeros(V), targets)
        assert found.dtype == torch.float32
        assert (found - want).norm() <= 2 * (plain - want).norm()
    assert counters["stats"]["unique_graphs"] == 2


@torch._dynamo.config.patch(recompile_limit=2)
def test_any_leading_sizes_many_settings_and_targets_without_a_class(monkeypatch):
    """More temperatures than Dynamo compiles one function for."""
    monkeypatch.setattr(lm_head, "_compiles", lambda _: True)
    for i, lead in enumerate([(0,), *[(2, 1, 3)] * 3]):
        hidden, weight, bias, targets = inputs(torch.float64, *lead)
        ignored = torch.arange(targets.numel()).view(lead) % 2 == 1
        given = targets.masked_fill(ignored, -100).int()
        found = token_log_probs(hidden, weight, given, bias=bias, temperature=1 + i / 8)
        want = exact(hidden, weight, bias, targets, 1 + i / 8)[0].masked_fill(ignored, 0.0)
        torch.testing.assert_close(found, want)
    assert counters["stats"]["unique_graphs"] == 4
    one = token_log_probs(hidden[0, 0, 0], weight, given[0, 0, 0], bias=bias, temperature=1 + i / 8)
    torch.testing.assert_close(one, want[0, 0, 0])


def test_under_autocast_the_weight_may_be_wider():
    hidden, weight, _, targets = inputs(torch.float32)
    low, lower = hidden.bfloat16(), weight.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_log_probs(low, weight, targets)
    torch.testing.assert_close(found, token_log_probs(low, lower, targets), rtol=0, atol=0)


@pytest.mark.parametrize("change", [
    {"targets": torch.zeros(2, 5, dtype=torch.long)}, {"weight": torch.ones(V, K + 1)},
    {"bias": torch.ones(K)}, {"weight": torch.ones(V, K).half()}, {"targets": torch.zeros(2, 6)},
    {"temperature": 0.0}, {"softcap": -1.0},
])  # fmt: skip
def test_what_does_not_fit_is_named(change):
    hidden, weight, _, targets = inputs(torch.float32)
    given = {"hidden": hidden, "weight": weight, "targets": targets} | change
    (name,) = change
    with pytest.raises(ValueError, match=f"token_log_probs: .*{name}"):
        token_log_probs(**given)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_temperature_does_not_round_logits_again(compiled, monkeypatch):
    """Without a kernel it scales them in float32; with one they are kept in 16 bits."""
    monkeypatch.setattr(lm_head, "_compiles", lambda _: compiled)
    hidden, weight, _, targets = inputs(torch.bfloat16, 6)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        found = token_log_probs(hidden, weight, targets, temperature=0.7)
    if compiled:
        assert [x.dtype for x in saved if x.shape == (6, V)] == [torch.bfloat16]
    else:
        scaled = F.linear(hidden, weight).float() / 0.7
        assert torch.equal(found, -F.cross_entropy(scaled, targets, reduction="none"))
