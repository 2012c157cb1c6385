# SPDX-License-Identifier: Apache-2.0
"""Cross entropy behind an LM head (R7): no float32 logits, statistics from the epilogue, sliced
gradients; of scaled and capped logits and of some of their rows, with terms beside it, or not."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, leave_custom_ops, raised, randn, slice_logits
from harness import Harness, Stock
from passes import codes
from test_tokens import cold
from zoo import edges
from zoo.heads import ROWS, B, D, Head, Several, T, V, inputs, wide

from coda_inductor.compat import functorch_config
from coda_inductor.semantic.loss import cross_entropy


@pytest.fixture
def slices(monkeypatch):
    """Let logits count as large, 16 bits too: three slices of the vocabulary, one ragged."""
    slice_logits(monkeypatch, ROWS * 2 * 128)


def rows(logits):
    return logits.reshape(-1, V)


def capped(logits, cap=1.5):
    """As Gemma 2 writes it; the cap is low enough to bend these logits."""
    logits = logits / cap
    logits = torch.tanh(logits)
    return logits * cap


def hugging_face(logits, labels):
    """As in ForCausalLMLoss of transformers; here the cast keeps float64 exact."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(wide(logits).view(-1, V), labels.view(-1), ignore_index=-100)


def entropy(logits, labels, **how):
    return F.cross_entropy(rows(logits), labels.reshape(-1), **how)


def smoothed(logits, labels):
    return entropy(logits, labels, label_smoothing=0.1, ignore_index=3)


def likelihood(logits, labels, **how):
    chances = rows(logits).log_softmax(-1, dtype=logits.dtype)
    return F.nll_loss(chances, labels.view(-1), **how)


def z_loss(logits, labels):
    return hugging_face(logits, labels) + 0.1 * wide(logits).logsumexp(-1).square().mean()


def z_loss_of_rows_that_count(logits, labels):
    z = torch.where(labels.view(-1) == 3, 0.0, torch.logsumexp(rows(logits), -1).square())
    return smoothed(logits, labels) + 0.1 * z.sum()


class Bent(torch.autograd.Function):
    """``2 * tanh(z / 2)``, whose gradient has another ``slope``."""

    @staticmethod
    def forward(ctx, z, slope):
        t = torch.tanh(z / 2)
        ctx.save_for_backward(t)
        ctx.slope = slope
        return t * 2

    @staticmethod
    def backward(ctx, g):
        (t,) = ctx.saved_tensors
        return g * 2 * ctx.slope(t) / 2, None


def shifted(logits, labels):
    """As models were written before Hugging Face padded labels."""
    logits, labels = wide(logits)[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def penalized_rows(logits, labels):
    seen = wide(rows(logits[:, :-1]))
    loss = F.cross_entropy(seen, labels[:, 1:].reshape(-1))
    return loss + 0.01 * seen.logsumexp(-1).square().mean()


#: Losses of logits (B, T, V) and labels (B, T).
SLICED = {
    **{f.__name__: f for f in (
        hugging_face, smoothed, z_loss_of_rows_that_count, shifted, penalized_rows,
    )},
    "fairseq": lambda z, y: likelihood(z, y, ignore_index=3, reduction="sum"),
    "a row each": lambda z, y: entropy(z, y, ignore_index=3, reduction="none"),
    "scaled and capped": lambda z, y: smoothed(capped(z * 0.3), y),
    "scaled, z-loss": lambda z, y: z_loss(z / 7, y),
    "capped and shifted": lambda z, y: shifted(capped(z), y),
    "every second": lambda z, y: entropy(z[:, ::2], y[:, ::2]),
}  # fmt: skip


def sizes(nodes):
    made = [n.meta.get("val") for n in nodes if n.op == "call_function"]
    return [t.numel() for t in made if isinstance(t, torch.Tensor)]


def test_sliced_gradients_agree(slices):
    models, number = Several(Head(loss, bias=True) for loss in SLICED.values()), len(SLICED)
    harness = check_gradients(models, *inputs())
    assert harness.counts["cross_entropy_backward"] == harness.counts["cross_entropy"] == number
    sites = [s for s in harness.report.sites if "cross_entropy" in s.patterns]
    assert len(sites) == number
    assert {s.program.reduces[0].combine for s in sites} <= {"logsumexp", "max"}
    made = sizes(harness.parts[1].nodes)
    assert made.count(V * D) >= number
    assert ROWS * V not in made
    logits = (ROWS * V, (ROWS - B) * V, ROWS * V // 2)
    assert sum(size in logits for size in sizes(harness.saved)) == number


def test_logits_are_saved_as_they_are(slices):
    """With bfloat16 logits and the cast that losses are written with."""
    model = Head(shifted, torch.bfloat16)
    harness = check_gradients(model, *inputs(torch.bfloat16))
    assert harness.counts["cross_entropy_backward"] == 1
    kept = [n.meta["val"] for n in harness.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    logits = [t for t in kept if t.numel() in (ROWS * V, (ROWS - 2) * V)]
    assert [(t.dtype, t.numel()) for t in logits] == [(torch.bfloat16, ROWS * V)]


#: Over rows, weighted, of chances that others read, of soft targets, with classes in the middle.
OTHER_LOSSES = (
    lambda z, y: F.nll_loss(F.log_softmax(rows(z), 0), y.view(-1)),
    lambda z, y: likelihood(z, y, weight=z.new_ones(V)),
    lambda z, y: F.nll_loss(p := F.log_softmax(rows(z), -1), y.view(-1)) - 0.1 * p.mean(),
    lambda z, y: entropy(z, y, weight=torch.linspace(1, 2, V, dtype=z.dtype)),
    lambda z, y: F.cross_entropy(rows(z), rows(F.one_hot(y, V).to(z.dtype))),
    lambda z, y: F.cross_entropy(z.transpose(1, 2).contiguous(), y),
)


def test_other_losses_are_left_alone():
    harness = check_gradients(Several(map(Head, OTHER_LOSSES)), *inputs())
    assert raised(harness, cross_entropy) == 0
    assert {"loss-targets", "intermediate-used"} <= codes(harness)


#: Gradients of logits that are not sliced.
READ = (
    lambda z, y: hugging_face(2 * (bent := torch.tanh(z / 2)), y) + bent.sum(),
    lambda z, y: hugging_face(scaled := z * 0.5, y) + scaled.square().mean(),
    lambda z, y: F.cross_entropy(z[..., :200].reshape(-1, 200), y.reshape(-1) % 200),
    lambda z, y: hugging_face(z, y) + z.square().mean(),
    lambda z, y: hugging_face(3 * torch.tanh(z / 2), y),  # bent
    lambda z, y: hugging_face(Bent.apply(z, lambda t: 1 - t), y),
    lambda z, y: hugging_face(Bent.apply(z, lambda t: 1 - t * t.sin()), y),
    lambda z, y: hugging_face(2 * torch.tanh(torch.sin(z) / 2), y),  # twice
)


def test_a_gradient_with_other_readers_is_not_sliced(slices):
    harness = check_gradients(Several(map(Head, READ)), *inputs())
    assert raised(harness, cross_entropy) == len(READ)
    assert harness.counts["cross_entropy_backward"] == 0
    assert "logits-read" in codes(harness)


@pytest.mark.parametrize(("loss", "dtype", "tolerance"), [
    (lambda z, y: entropy(z[:, :-1].float(), y[:, 1:]), torch.float64, 1e-5),  # rounded
    # A cap that is more precise than its logits; rows that may overflow.
    (lambda z, y: hugging_face((2 * torch.tanh(z.float() / 2)).bfloat16(), y), torch.bfloat16,
     None),
    (shifted, torch.float16, None),
])  # fmt: skip
def test_what_would_be_rounded_otherwise_is_not_sliced(loss, dtype, tolerance, slices):
    harness = check_gradients(Head(loss, dtype), *inputs(dtype), tolerance=tolerance)
    assert raised(harness, cross_entropy) == 1
    assert harness.counts["cross_entropy_backward"] == 0
    assert {"logits-read", "idiom-form", "logits-dtypes"} & codes(harness)


def returned(x, w, labels, _):
    logits = x @ w.T
    return hugging_face(logits, labels), logits


def several(x, w, labels, _):
    """Codebooks, or several tokens predicted at once."""
    logits = F.linear(x, w).view(B, T, 3, V)
    return hugging_face(logits, labels[..., None].expand(-1, -1, 3)) + x.sum()


#: Heads of x, of a weight, labels and a tile of logits, the code of why the gradient is not sliced.
WHOLE = [
    (returned, "logits-read"),
    (lambda x, w, y, tile: hugging_face(x @ w.T + tile, y), "logits-read"),  # is returned
    (lambda x, w, y, _: hugging_face(F.linear(x, w).float() + 0.5, y), "logits-dtypes"),  # wider
    (several, "idiom-form"),
]


@pytest.mark.parametrize(("head", "code"), WHOLE)
def test_what_keeps_the_gradient_of_logits_whole(head, code, slices):
    dtype = torch.bfloat16 if code == "logits-dtypes" else torch.float64
    x, labels = inputs(dtype)
    w, tile = (
        randn(*s, dtype=dtype).requires_grad_()
        for s in ((3 * V if code == "idiom-form" else V, D), (B, T, V))
    )
    harness = check_gradients(head, x, w, labels, tile)
    assert harness.counts["cross_entropy_backward"] == 0
    assert code in codes(harness)


@pytest.mark.parametrize(
    ("returned", "donated", "sliced"), [(True, True, 1), (False, True, 0), (False, False, 1)]
)
def test_logits_that_nobody_else_has_are_overwritten(returned, donated, sliced, monkeypatch):
    """Slices would need more memory then. Where AOTAutograd donates nothing, a second tensor like
    these logits is larger than both gradients of the head."""
    rows, features, columns = 96, 8, 512
    monkeypatch.setattr("coda_inductor.semantic.loss.SLICE_BYTES", rows * 128 * 8)
    x, labels = randn(rows, features).requires_grad_(), torch.randint(columns, (rows,))

    def function(x, w):
        logits = x @ w.t()
        return F.cross_entropy(logits, labels), *[logits.detach().view(2, -1, columns)] * returned

    with functorch_config.patch(donated_buffer=donated):
        harness = check_gradients(function, x, randn(columns, features).requires_grad_())
    assert harness.counts["cross_entropy_backward"] == sliced
    assert ("no-gain" in codes(harness)) != sliced


@pytest.mark.parametrize("only", [False, True])
def test_a_bias_added_by_hand(only, slices):
    """A gradient of it alone is not sliced."""

    def head(x, w, b, labels):
        return hugging_face(x @ w.T + b, labels)

    x, labels = inputs()
    x, w, b = (t.detach().requires_grad_(not only) for t in (x, randn(V, D), randn(V)))
    harness = check_gradients(head, x, w, b.requires_grad_(), labels)
    assert harness.counts["cross_entropy_backward"] == (not only)
    assert ("idiom-form" in codes(harness)) == only


@pytest.mark.parametrize("frozen", ["head", "body and input"])
def test_only_wanted_gradients(frozen, slices):
    model, (x, labels) = Head(hugging_face, bias=frozen != "head"), inputs()
    if frozen == "head":
        model.head.requires_grad_(False)
    else:
        model.body.requires_grad_(False)
        x = x.detach()
    assert check_gradients(model, x, labels).counts["cross_entropy_backward"] == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_a_mask_picks(monkeypatch):
    """The head reads the picked rows; where nothing fuses, the op is taken apart. Their number,
    which nothing tells, is taken for 8192: a slice is a tenth of such logits."""
    slice_logits(monkeypatch, 8192 * V * 8 // 10)

    class Masked(Head):
        def forward(self, x, labels):
            counts = labels != 3
            return F.cross_entropy(self.head(torch.tanh(self.body(x))[counts]), labels[counts])

    for gate, dynamic in (("always", True), ("never", False)):
        harness = check_gradients(Masked(None), *inputs(), dynamic=dynamic, gate=gate)
        assert raised(harness, cross_entropy) == 1
        assert harness.counts["cross_entropy_backward"] == (gate == "always")


def test_evaluation_and_all_rows_ignored(monkeypatch):
    """Each tile has a log-sum-exp of its own, of which one is taken."""
    leave_custom_ops(monkeypatch, "64x32:1x1:co")
    x, labels = inputs()
    for given in (labels, torch.full_like(labels, -100)):
        harness = check(lambda x, w, y: hugging_face(x @ w.T, y), x, randn(V, D), given)
        assert harness.counts["cross_entropy"] == harness.ops()["aten.exp.default"] == 1


@pytest.mark.parametrize(("loss", "bias", "body_bias"), [
    (SLICED["scaled and capped"], True, True), (SLICED["scaled, z-loss"], False, True),
    (cold, True, False),
])  # fmt: skip
def test_bfloat16_is_no_less_accurate_than_eager(loss, bias, body_bias, slices):
    """Nor than torch.compile; no factor is rounded into the gradient of the loss."""
    backends = [backend.train for backend in (Stock(), Harness(reference=True))]
    compilers = [functools.partial(functools.partial, train) for train in backends]
    edges.hold(Head(loss, torch.bfloat16, bias, body_bias=body_bias), inputs(), compilers)


def test_sliced_op_obeys_torchs_rules():
    logits, labels, how = randn(6, 9), torch.arange(6), (1, 0.1, "mean")
    _, lse, number = cross_entropy(logits, labels, *how, torch.float64)
    sliced = torch.ops.coda_inductor.linear_cross_entropy_backward.default
    given = randn(), logits, labels, lse, number, randn(9, 5), randn(6, 5), *randn(3, 6)
    torch.library.opcheck(sliced, (*given, *how, 3.0, True))


IGNORED = 5
#: What is added to one row of logits, at the target and elsewhere.
EDGES = [
    (0.0, 0.0), (0.0, math.inf), (math.inf, 0.0), (math.inf, math.inf), (0.0, -math.inf),
    (-math.inf, 0.0), (0.0, math.nan), (math.nan, 0.0), (-math.inf, math.inf),
]  # fmt: skip


def edge_rows():
    """(M, V) to add to logits, and targets (M,): every edge, with a target that counts and with an
    ignored one; then rows of one value only."""
    edges, targets = [], []
    for target in (7, IGNORED):
        for on, off in EDGES:
            row = torch.zeros(V, dtype=torch.float64)
            row[target], row[200] = on, off
            edges.append(row)
        edges += [torch.full((V,), number).double() for number in (-math.inf, math.inf)]
        targets += [target] * (len(EDGES) + 2)
    return torch.stack(edges), torch.tensor(targets)


@pytest.mark.parametrize(("smoothing", "sliced"), [(0.0, False), (1.0, False), (0.1, True)])
def test_every_row_and_its_gradient(smoothing, sliced, monkeypatch):
    def losses(x, w, edges, targets):
        how = {"label_smoothing": smoothing, "reduction": "none", "ignore_index": IGNORED}
        return F.cross_entropy(F.linear(x, w) + edges, targets, **how)

    edges, targets = edge_rows()
    if sliced:
        slice_logits(monkeypatch, len(targets) * 8 * 128)
    x, w = randn(len(targets), D).requires_grad_(), randn(V, D)
    edges.requires_grad_(not sliced)
    harness = check_gradients(losses, x, w, edges, targets)
    assert harness.counts["cross_entropy"] == 1
    assert harness.counts["cross_entropy_backward"] == sliced
