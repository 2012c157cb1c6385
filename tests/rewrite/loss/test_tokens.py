# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of tokens (R7), as policy gradients and their metrics need them:
in the head's epilogue, alone and with gradients of both."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, leave_custom_ops, raised, randn, slice_logits
from harness import Harness
from passes import codes
from zoo.heads import ROWS, B, D, Head, Several, T, V, inputs, wide

from coda_inductor.refusal import refuse
from coda_inductor.semantic.loss import cross_entropy, entropy
from coda_inductor.sites import Sites


def picked(z, y):
    return F.log_softmax(wide(z), -1).gather(-1, y[..., None]).squeeze(-1)


def from_logits(z):
    chances = F.softmax(z, dim=-1)
    return torch.logsumexp(z, dim=-1) - torch.sum(chances * z, dim=-1)


def from_logarithms(z):
    """As in TRL, without its chunks."""
    logs = F.log_softmax(z, dim=-1)
    return -(torch.exp(logs) * logs).sum(-1)


def policy(z, y, of=from_logits):
    """A policy gradient with an entropy bonus."""
    return picked(z, y) * (y != 3) + 0.3 * of(wide(z))


def one_softmax(z, y):
    logs = F.log_softmax(wide(z), -1)
    each = logs.gather(-1, y[..., None]).squeeze(-1)
    return each, -(logs.exp() * logs).sum(-1)


def cold(z, y):
    return one_softmax(z / 0.7, y)


def capped(z, y):
    return policy(2 * torch.tanh(z / 2), y)


FORMS = {
    **{f.__name__: f for f in (policy, one_softmax, cold)},
    "from logarithms": functools.partial(policy, of=from_logarithms),
    "without the last": lambda z, y: one_softmax(z[:, :-1], y[:, 1:]),
    "two slices": lambda z, y: one_softmax(z[:, :-1, :][:, -3:] / 0.7, y[:, -3:]),  # older TRL's
    "capped completions": lambda z, y: policy(wide(2 * torch.tanh(z / 2))[..., -3:, :], y[:, -3:]),
    "smoothed": lambda z, y: (
        F.cross_entropy(wide(z).view(-1, V), y.view(-1), label_smoothing=0.1, ignore_index=3)
        - from_logits(wide(z)).mean()
    ),
}


def test_both_leave_one_epilogue_and_one_sliced_gradient(monkeypatch):
    slice_logits(monkeypatch, ROWS * 2 * 128)
    models, number = Several(Head(form, bias=True) for form in FORMS.values()), len(FORMS)
    harness = check_gradients(models, *inputs())
    assert raised(harness, cross_entropy) == raised(harness, entropy) == number
    counts = dict.fromkeys(("cross_entropy", "entropy", "cross_entropy_backward"), number)
    assert {key: harness.counts[key] for key in counts} == counts
    sites = [s for s in harness.report.sites if "entropy" in s.patterns]
    assert len(sites) == number
    for site in sites:
        assert {"logsumexp", "entropy"} <= {r.combine for r in site.program.reduces}
    made = [t.numel() for n in harness.saved if isinstance(t := n.meta.get("val"), torch.Tensor)]
    logits = (ROWS * V, (ROWS - 2) * V, 3 * B * V)
    assert sum(size in logits for size in made) == number


@pytest.mark.parametrize("loss", [one_softmax, cold, capped, FORMS["smoothed"]])
@pytest.mark.parametrize("tiles", [False, True])
def test_without_gradients_no_logits_are_in_memory(loss, tiles, monkeypatch):
    """Old policies and reference models; with partials of several tiles too."""
    if tiles:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    x, labels = inputs()
    harness = check(lambda x, w, y: loss(x @ w.T, y), x, randn(V, D), labels)
    assert harness.counts["cross_entropy"] == harness.counts["entropy"] == 1
    (site,) = harness.fused
    assert not site.program.stores


@pytest.mark.parametrize("made", [False, True])
def test_targets_are_gathered_from_logits_that_no_kernel_makes(made, monkeypatch):
    """They are inputs, or results of a GEMM that may not be a kernel."""
    if made:
        monkeypatch.setattr(Sites, "refusal", lambda *_: refuse("kernel-form", "none"))
    (x, labels), w = inputs(), randn(V, D)
    given, logits = ((x, w), lambda x, w: x @ w.T) if made else ([randn(B, T, V)], lambda z: z)
    harness = check(lambda y, *g: one_softmax(logits(*g), y), labels, *given)
    assert harness.ops()["aten.gather.default"] == 1
    assert harness.ops()["aten.lt.Scalar"] == 0  # of distances between columns


def test_a_target_out_of_range_is_an_error_where_logits_are_not_stored():
    x, labels = inputs()
    harness = Harness(reference=True)
    with pytest.raises(RuntimeError, match="out of bounds"):
        harness.run(lambda x, w, y: one_softmax(x @ w.T, y), x, randn(V, D), labels + V)


@pytest.mark.parametrize("loss", [one_softmax, lambda z, y: one_softmax(wide(z) / 0.7, y)])
def test_logits_that_are_not_stored_round_as_if_they_were(loss):
    """Else a policy would differ from itself."""
    x, labels = (t.detach() for t in inputs(torch.bfloat16))
    w = randn(V, D, dtype=torch.bfloat16)

    def function(x, w, y):
        return loss(x @ w.T, y)

    alone = Harness(reference=True).run(function, x, w, labels)
    trained = Harness(reference=True).train(function, x.clone().requires_grad_(), w, labels)
    torch.testing.assert_close(alone, tuple(t.detach() for t in trained), rtol=0, atol=2e-6)


@pytest.mark.parametrize("reader", [
    lambda z, y: (one_softmax(z, y), z),
    lambda z, y: (one_softmax(z, y), z.argmax(-1)),
    lambda z, y: (one_softmax(z, y), wide(z).sum()),
])  # fmt: skip
def test_logits_that_others_read_are_stored(reader):
    x, labels = inputs()
    harness = check(lambda x, w, y: reader(x @ w.T, y), x, randn(V, D), labels)
    (site,) = harness.fused
    assert site.program.stores


def test_entropy_that_has_no_gradient():
    """A metric, beside log-probabilities that are trained."""
    harness = check_gradients(Head(lambda z, y: (picked(z, y), from_logits(z.detach()))), *inputs())
    assert harness.counts["cross_entropy"] == harness.counts["entropy"] == 1
    assert "entropy_backward" not in str(harness.raised)


def read_twice(z, y):
    logs = F.log_softmax(z, -1)
    return picked(z, y), -(logs.exp() * logs).sum(-1) + logs.mean(-1)


#: Entropies that stay.
OTHERS = (
    read_twice,
    lambda z, y: -(z.softmax(1) * z.log_softmax(1)).sum(1),
    lambda z, y: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1, keepdim=True),
    lambda z, y: -(z.softmax(-1) * (2 * z).log_softmax(-1)).sum(-1),
    lambda z, y: -(z.softmax(-1) * z.log_softmax(-1)).sum(1),
)


def test_other_sums_are_left_alone():
    harness = check_gradients(Several(map(Head, OTHERS)), *inputs())
    assert raised(harness, entropy) == 0
    assert "intermediate-used" in codes(harness)


def test_tokens_without_a_chance():
    """They add nothing to an entropy and its gradient, where eager's ``0 * -inf`` is NaN."""

    def function(z):
        return from_logits(z), picked(z, torch.zeros(3, dtype=torch.int64))

    z = randn(3, 8)
    z[1, 2:] = -torch.inf
    ours = z.clone().requires_grad_()
    have = Harness().train(function, ours)
    want = function(torch.where(z.isinf(), -1e4, z))
    torch.testing.assert_close(list(have), list(want))
    sum(t.sum() for t in have).backward()
    assert ours.grad.isfinite().all()


def warm(z, y):
    return one_softmax(wide(z) / 0.7, y)


def logits_kept(harness):
    """Dtypes of what is kept for the backward pass and has the size of the logits."""
    kept = [t for n in harness.saved if isinstance(t := n.meta.get("val"), torch.Tensor)]
    return [t.dtype for t in kept if t.numel() == ROWS * V]


def test_logits_that_are_scaled_in_float32_are_kept_in_16_bits(monkeypatch):
    """As OpenRLHF has them; their gradient is sliced, and is as exact as in eager."""
    slice_logits(monkeypatch, ROWS * 2 * 128)
    model, given = Head(warm, torch.bfloat16), inputs(torch.bfloat16)
    exact = copy.deepcopy(model).double()
    harness = Harness(reference=True)

    def gradients(run, model, x, labels):
        x = x.detach().requires_grad_()
        loss = sum(part.sum() for part in run(model, x, labels))
        return [g.double() for g in torch.autograd.grad(loss, (x, model.head.weight))]

    mine, eager = (
        gradients(run, model, *given) for run in (harness.train, lambda f, *args: f(*args))
    )
    want = gradients(lambda f, *args: f(*args), exact, given[0].double(), given[1])
    for got, plain, right in zip(mine, eager, want, strict=True):
        assert (got - right).norm() <= 1.5 * (plain - right).norm()
    assert logits_kept(harness) == [torch.bfloat16]
    assert harness.counts["cross_entropy_backward"] == 1


def ranked(z, y):
    x = wide(z) / 0.7
    return *one_softmax(x, y), x.argmax(-1)


@pytest.mark.parametrize(("form", "how"), [(ranked, {}), (warm, {"disable": ["rounded_logits"]})])
def test_logits_that_others_read_are_kept_in_float32(form, how):
    """All are where the pass is disabled."""
    harness = Harness(reference=True, **how)
    harness.train(Head(form, torch.bfloat16), *inputs(torch.bfloat16))
    assert logits_kept(harness) == [torch.float32]


def test_logits_that_no_kernel_makes_are_not_rounded_again(monkeypatch):
    monkeypatch.setattr(Sites, "refusal", lambda *_: refuse("kernel-form", "none"))
    model, given = Head(warm, torch.bfloat16), inputs(torch.bfloat16)
    torch.testing.assert_close(Harness().train(model, *given), model(*given), rtol=0, atol=1e-5)
