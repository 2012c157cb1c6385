# SPDX-License-Identifier: Apache-2.0
"""Cross entropy behind an LM head (R7): no float32 logits, statistics from the epilogue, sliced
gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, differentiate, raised, randn, reasons
from harness import Harness
from language_model import B, D, LanguageModel, T, V, inputs
from passes import codes
from torch._dynamo.utils import counters

from coda_inductor.runtime import linear_cross_entropy
from coda_inductor.semantic.loss import cross_entropy

ROWS = B * T


def hugging_face(logits, labels):
    """As in ForCausalLMLoss of transformers; here the cast keeps float64 exact."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=-100)


def torchtitan(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))


def summed(logits, labels):
    rows = logits.reshape(-1, V)
    return F.cross_entropy(rows, labels.reshape(-1), reduction="sum") / 7


def smoothed(logits, labels):
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), label_smoothing=0.1, ignore_index=3)


def a_row_each(logits, labels):
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=3, reduction="none")


def fairseq(logits, labels):
    chances = F.log_softmax(logits, dim=-1)
    return F.nll_loss(chances.view(-1, V), labels.view(-1), ignore_index=3, reduction="sum")


def likelihood(logits, labels):
    chances = logits.view(-1, V).log_softmax(-1, dtype=logits.dtype)
    return F.nll_loss(chances, labels.view(-1))


LOSSES = (hugging_face, torchtitan, summed, smoothed, a_row_each, fairseq, likelihood)


@pytest.mark.parametrize("what", ["dim", "weight", "read", "smoothing"])
def test_likelihoods_that_are_other_losses(what):
    def function(logits, labels):
        rows, targets = logits.view(-1, V), labels.view(-1)
        if what == "dim":
            return F.nll_loss(F.log_softmax(rows, 0), targets)
        chances = F.log_softmax(rows, -1)
        if what == "weight":
            return F.nll_loss(chances, targets, weight=logits.new_ones(V))
        loss = F.nll_loss(chances, targets)
        return loss - (0.1 * chances.mean() if what == "smoothing" else chances[0, 0])

    harness = check_gradients(LanguageModel(function), *inputs())
    assert raised(harness, cross_entropy) == 0


def soft_capped(logits, labels):
    """As Gemma 2 writes it; the cap is low enough to bend these logits."""
    logits = logits / 1.5
    logits = torch.tanh(logits)
    return hugging_face(logits * 1.5, labels)


def soft_capped_by_factor(logits, labels):
    return smoothed(3 * torch.tanh(logits * (1 / 3)), labels)


@pytest.fixture
def slices(monkeypatch):
    """Let logits count as large, 16 bits too: three slices of the vocabulary, one ragged."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", ROWS * 2 * 128)


@pytest.mark.parametrize("loss", LOSSES)
def test_sliced_gradients_agree(loss, slices):
    harness = check_gradients(LanguageModel(loss), *inputs())
    assert harness.counts["cross_entropy"] == harness.counts["cross_entropy_backward"] == 1
    (site,) = [s for s in harness.report.sites if "cross_entropy" in s.patterns]
    assert site.program.reduces[0].combine == "logsumexp"
    calls = [n for n in harness.graph.nodes if "linear_cross_entropy_backward" in str(n.target)]
    assert len(calls) == 1
    largest = max(n.meta["val"].numel() for n in calls[0].users)
    assert largest == V * D  # the weight's gradient; none of ROWS * V


def test_small_logits_are_not_sliced():
    harness = check_gradients(LanguageModel(torchtitan), *inputs())
    assert harness.counts["cross_entropy"] == 1
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-small" in codes(harness)


def test_logits_are_saved_as_they_are(slices):
    """With bfloat16 logits and the cast that losses are written with."""
    model = LanguageModel(hugging_face, torch.bfloat16)
    harness = check_gradients(model, *inputs(torch.bfloat16))
    saved = [n.meta["val"] for n in harness.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    assert {t.dtype for t in saved if t.numel() == ROWS * V} == {torch.bfloat16}


@pytest.mark.parametrize("loss", [soft_capped, soft_capped_by_factor])
def test_sliced_gradients_behind_a_soft_cap(loss, slices):
    harness = check_gradients(LanguageModel(loss, bias=True), *inputs())
    assert harness.counts["cross_entropy_backward"] == 1
    kept = [n.meta["val"] for n in harness.saved]
    assert sum(t.numel() == ROWS * V for t in kept if isinstance(t, torch.Tensor)) == 1


@pytest.mark.parametrize("loss", [hugging_face, smoothed])
def test_sliced_gradient_of_a_bias(loss, slices):
    harness = check_gradients(LanguageModel(loss, bias=True), *inputs())
    assert harness.counts["cross_entropy_backward"] == 1
    made = [n.meta.get("val") for n in harness.parts[1].nodes if n.op == "call_function"]
    sizes = [t.numel() for t in made if isinstance(t, torch.Tensor)]
    assert V * D in sizes
    assert ROWS * V not in sizes


def z_loss(logits, labels):
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = torch.logsumexp(wide, -1).square()
    return hugging_face(logits, labels) + 0.1 * z.mean()


def z_loss_of_rows_that_count(logits, labels):
    z = torch.logsumexp(logits.view(-1, V), -1)
    z = torch.where(labels.view(-1) == 3, 0.0, z.square())
    return smoothed(logits, labels) + 0.1 * z.sum()


def capped_z_loss(logits, labels):
    return z_loss(1.5 * torch.tanh(logits / 1.5), labels)


def z_loss_of_one_view(logits, labels):
    """Both losses read the same rows of logits, widened."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows, targets = wide.view(-1, V), labels.view(-1)
    loss = F.cross_entropy(rows, targets, ignore_index=3)
    return loss + 0.1 * torch.logsumexp(rows, -1).square().mean()


@pytest.mark.parametrize(
    "loss", [z_loss, z_loss_of_rows_that_count, capped_z_loss, z_loss_of_one_view]
)
def test_sliced_gradients_with_a_z_loss(loss, slices):
    harness = check_gradients(LanguageModel(loss, bias=True), *inputs())
    assert harness.counts["cross_entropy_backward"] == 1
    made = [n.meta.get("val") for n in harness.parts[1].nodes if n.op == "call_function"]
    assert ROWS * V not in [t.numel() for t in made if isinstance(t, torch.Tensor)]


class RowTerm(torch.autograd.Function):
    """Its gradient is a value a row times ``exp(logits - b)``, b being no log-sum-exp; or with
    other rows' logits, ``by`` rows away."""

    @staticmethod
    def forward(ctx, logits, b, by):
        ctx.save_for_backward(logits, b)
        ctx.by = by
        return logits.sum()

    @staticmethod
    def backward(ctx, g):
        logits, b = ctx.saved_tensors
        logits = logits.roll(ctx.by, 1) if ctx.by else logits
        return (g * b)[..., None] * torch.exp(logits - b[..., None]), None, None


def row_term(logits, labels, by=0):
    b = torch.arange(3.0, 15.0, dtype=logits.dtype).view(2, 6)
    return hugging_face(logits, labels) + RowTerm.apply(logits, b, by)


def test_a_row_term_of_other_values(slices):
    harness = check_gradients(LanguageModel(row_term), *inputs())
    assert harness.counts["cross_entropy_backward"] == 1


def test_a_bias_added_by_hand(slices):
    def head(x, w, b, labels):
        return hugging_face(x @ w.T + b, labels)

    x, labels = inputs()
    w, b = randn(V, D).requires_grad_(), randn(V).requires_grad_()
    assert check_gradients(head, x, w, b, labels).counts["cross_entropy_backward"] == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_makes_several_rows_of_logits_is_not_sliced(frozen, slices):
    """Codebooks, or several tokens predicted at once."""

    def function(x, w, labels):
        h = x.detach() if frozen else x
        return hugging_face(F.linear(h, w).view(*x.shape[:2], 3, V), labels) + x.sum()

    x, labels = inputs()
    labels = labels.repeat_interleave(3, -1).view(*labels.shape, 3)
    harness = check_gradients(function, x, randn(3 * V, D).requires_grad_(), labels)
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-form" in codes(harness)


@pytest.mark.parametrize("frozen", ["head", "weight", "body and input"])
def test_only_wanted_gradients(frozen, slices):
    model, (x, labels) = LanguageModel(hugging_face, bias=frozen != "head"), inputs()
    if frozen == "head":
        model.head.requires_grad_(False)
    elif frozen == "weight":
        model.head.weight.requires_grad_(False)
    else:
        model.body.requires_grad_(False)
        x = x.detach()
    assert check_gradients(model, x, labels).counts["cross_entropy_backward"] == 1


def of_picked_rows(logits, labels):
    """As masked language models write it: the number of rows is known when it runs."""
    counts = labels != 3
    return F.cross_entropy(logits[counts], labels[counts])


@pytest.mark.parametrize("dynamic", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_a_mask_picks(dynamic, monkeypatch):
    """The head reads the picked rows; where nothing fuses, the op is taken apart. Their number,
    which nothing tells, is taken for 8192: a slice is a tenth of such logits."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 8192 * V * 8 // 10)

    class Masked(LanguageModel):
        def forward(self, x, labels):
            counts = labels != 3
            return F.cross_entropy(self.head(torch.tanh(self.body(x))[counts]), labels[counts])

    for options in ({}, {"gate": "never"}):
        harness = check_gradients(Masked(None), *inputs(), dynamic=dynamic, **options)
        assert raised(harness, cross_entropy) == 1
    harness = check_gradients(Masked(None), *inputs(), dynamic=dynamic)
    assert harness.counts["cross_entropy_backward"] == 1
    check_gradients(LanguageModel(of_picked_rows), *inputs(), dynamic=dynamic)


def test_evaluation_and_all_rows_ignored():
    def evaluate(x, w, labels):
        return hugging_face(x @ w.T, labels)

    x, labels = inputs()
    assert check(evaluate, x, randn(V, D), labels).counts["cross_entropy"] == 1
    assert check(evaluate, x, randn(V, D), torch.full_like(labels, -100)).counts["cross_entropy"]


@pytest.mark.parametrize(
    ("loss", "bias"),
    [(hugging_face, False), (hugging_face, True), (soft_capped, True), (z_loss, False)],
)
def test_bfloat16_is_no_less_accurate_than_eager(loss, bias, slices):
    torch.manual_seed(0)
    counters.clear()
    torch._dynamo.reset()
    half = LanguageModel(loss, torch.bfloat16, bias)
    x, labels = inputs(torch.bfloat16)
    found = {}
    for name, dtype in (("exact", torch.float64), ("eager", None), ("ours", None)):
        model = LanguageModel(loss, dtype or torch.bfloat16, bias)
        model.load_state_dict(half.state_dict())
        leaf = x.detach().to(dtype or torch.bfloat16).requires_grad_()
        call = torch.compile(model, backend=Harness()) if name == "ours" else model
        value = call(leaf, labels)
        found[name] = [value, *differentiate(value, (model, (leaf,)))]
        if name == "ours":
            assert counters["coda"]["cross_entropy_backward"] == 1
    for ours, eager, exact in zip(found["ours"], found["eager"], found["exact"], strict=True):
        if exact is not None:
            norm = exact.norm()
            error = (ours.double() - exact).norm() / norm
            noise = 1e-4 if exact.dim() == 0 else 0  # one number, by chance nearly exact in eager
            assert error <= 1.2 * (eager.double() - exact).norm() / norm + noise


# Refusals.


def weighted(logits, labels):
    weight = torch.linspace(1, 2, V, dtype=logits.dtype)
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), weight=weight)


def soft_targets(logits, labels):
    probabilities = F.one_hot(labels, V).to(logits.dtype)
    return F.cross_entropy(logits.view(-1, V), probabilities.view(-1, V))


def classes_in_the_middle(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2).contiguous(), labels)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (weighted, ""),
        (soft_targets, "the targets are probabilities"),
        (classes_in_the_middle, "do not have their classes in the last dimension"),
    ],
)
def test_other_losses_are_left_alone(loss, reason):
    harness = check_gradients(LanguageModel(loss), *inputs())
    assert raised(harness, cross_entropy) == 0
    assert reason in reasons(harness)


def penalized(logits, labels):
    return hugging_face(logits, labels) + logits.square().mean()


def term_of_other_rows(logits, labels):
    return row_term(logits, labels, by=1)


def bent(logits, labels):
    return hugging_face(3 * torch.tanh(logits / 2), labels)


def bent_twice(logits, labels):
    return hugging_face(2 * torch.tanh(torch.sin(logits) / 2), labels)


def capped_and_penalized(logits, labels):
    bent = torch.tanh(logits / 2)
    return hugging_face(2 * bent, labels) + bent.sum()


OTHER_READERS = [penalized, term_of_other_rows, bent, bent_twice, capped_and_penalized]


@pytest.mark.parametrize("loss", OTHER_READERS)
def test_a_gradient_with_other_readers_is_not_sliced(loss, slices):
    harness = check_gradients(LanguageModel(loss), *inputs())
    assert raised(harness, cross_entropy) == 1
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-read" in codes(harness)


def capped_in_float32(logits, labels):
    return hugging_face((2 * torch.tanh(logits.float() / 2)).bfloat16(), labels)


def test_a_cap_more_precise_than_its_logits_is_left_alone(slices):
    model = LanguageModel(capped_in_float32, torch.bfloat16)
    harness = check_gradients(model, *inputs(torch.bfloat16))
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-read" in codes(harness)


def test_only_a_bias_is_trained(slices):
    def head(b, x, w, labels):
        return hugging_face(x @ w.T + b, labels)

    x, labels = inputs()
    harness = check_gradients(head, randn(V).requires_grad_(), x.detach(), randn(V, D), labels)
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-form" in codes(harness)


# The ops.


def test_sliced_op_obeys_torchs_rules():
    logits, labels, how = randn(6, 9), torch.arange(6), (1, 0.1, "mean")
    _, lse, number = cross_entropy(logits, labels, *how, torch.float64)
    sliced = torch.ops.coda_inductor.linear_cross_entropy_backward.default
    args = (
        randn(),
        logits,
        labels,
        lse,
        number,
        randn(9, 5),
        randn(6, 5),
        randn(6),
        *how,
        3.0,
        True,
    )
    torch.library.opcheck(sliced, args)
