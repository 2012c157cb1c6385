# SPDX-License-Identifier: Apache-2.0
"""Shapes and layouts: symbolic, empty, ragged, strided, expanded, shared. What leaves a fused graph
is as independent as what left the original one: a caller may write to one result alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, assert_same, check, check_gradients, leave_custom_ops, randn
from harness import Harness
from passes import codes

from coda_inductor.dynamo import late_gradients

K, N = 8, 10


def block(x, w, gamma, gate, up):
    """Residual, norm, SwiGLU: tile, row and column operands, partials, a pair."""
    stream = x + F.linear(x, w)
    n = F.rms_norm(stream, (K,), gamma, 1e-3)
    return F.silu(F.linear(n, gate)) * F.linear(n, up), stream


def weights():
    return randn(K, K), randn(K), randn(N, K), randn(N, K)


@pytest.mark.parametrize(("dims", "custom"), [((0,), False), ((0, 1), True)], ids=["B", "both"])
def test_symbolic_leading_dimensions(dims, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch)
    harness, args = Harness(), weights()
    compiled = torch.compile(block, backend=harness)
    for sizes in ((2, 3), (5, 4), (7, 9), (1, 2)):
        lead = [sizes[d] if d in dims else 6 for d in (0, 1)]
        x = randn(*lead, K)
        for d in dims:
            torch._dynamo.maybe_mark_dynamic(x, d)
        with torch.no_grad():
            assert_same(compiled(x, *args), block(x, *args))
    assert {site.how for site in harness.report.sites} == {"kernel" if custom else "reference"}


@pytest.mark.parametrize(("dynamic", "custom"), [(True, True), (False, False)])
def test_empty_batch_after_a_full_one(dynamic, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch)
    model = Weights(block, *weights())
    compiled = torch.compile(model, backend=Harness(), dynamic=dynamic)
    with torch.no_grad():
        for lead in ((3, 4), (0, 4), (1, 4), (2, 0)):
            x = randn(*lead, K)
            assert_same(compiled(x), model(x))


LAYOUTS = {
    "transposed batch": lambda: randn(3, 4, K).transpose(0, 1),
    "strided columns": lambda: randn(4, 3, 2 * K)[..., ::2],
    "expanded batch": lambda: randn(1, 3, K).expand(4, 3, K),
    "features first": lambda: randn(K, 4, 3).permute(1, 2, 0),
    "offset": lambda: randn(5, 3, K)[1:],
}


def test_strided_and_expanded_inputs(monkeypatch):
    leave_custom_ops(monkeypatch)

    def both(xs, ys, *weights):
        pairs = zip(xs, ys, strict=True)
        return [(*block(x, *weights), x + F.linear(y, weights[0])) for x, y in pairs]

    w, gamma, gate, up = weights()
    strided = w.repeat_interleave(2, 1)[:, ::2], gamma.repeat_interleave(2)[::2]
    strided += gate.repeat_interleave(2, 0)[::2], up.t().contiguous().t()
    for own in ((w, gamma, gate, up), strided):
        xs = [make() for make in LAYOUTS.values()]
        check(both, xs, [randn(4, 3, K) for _ in xs], *own)


def test_sizes_that_no_view_makes():
    def function(x, w):
        return F.linear(x, w).sin().unsqueeze(1).cos()

    harness = check(Weights(function, randn(N, K)), randn(2, 5, K), dynamic=True)
    assert codes(harness) == {"symbolic-shape"}


SHARED = {
    "one weight twice": (lambda x, w: F.silu(F.linear(x, w)) * F.linear(x, w), [(4, K), (N, K)]),
    "the input is the weight": (lambda x: torch.relu(x @ x) + x, [(K, K)]),
    "one column": (lambda x, w: torch.relu(x @ w + 1) * x[:, :1], [(6, K), (K, 1)]),
    "one row": (lambda x, w: torch.relu(x @ w + 1).sum(-1), [(1, K), (K, N)]),
    "a row is no column": (lambda x, w, v: F.linear(x, w) * v[:, None] + v, [(K, K), (K, K), (K,)]),
    "an expanded bias": (
        lambda x, w, b: F.linear(x, w, b.expand(N)).relu(), [(4, K), (N, K), (1,)],
    ),
}  # fmt: skip


def test_degenerate_and_shared_operands():
    def function(given):
        return [f(*args) for (f, _), args in zip(SHARED.values(), given, strict=True)]

    check(function, [[randn(*shape) for shape in shapes] for _, shapes in SHARED.values()])


def test_reductions_of_one_row_without_its_dimension():
    # No dimension means all of them.
    ways = [*itertools.product(((), (0,)), (False, True), (torch.sum, torch.mean, torch.amax))]

    def function(x, ws):
        each = zip(ways, ws, strict=True)
        return [
            reduce((x @ w).squeeze(0) * 2, dim=list(dim), keepdim=keep)
            for (dim, keep, reduce), w in each
        ]

    ws = [randn(K, N).requires_grad_() for _ in ways]
    check_gradients(function, randn(1, K).requires_grad_(), ws)


def test_equal_results_are_two_tensors_after_inductor():
    """Which drops a sum with a tensor of zeros, and what follows from equal steps. From torch 2.15
    on, Inductor by itself returns y three times."""

    def function(x, w):
        y = x @ w
        return y, y + 0, y * 1, torch.sigmoid(y), torch.sigmoid(y)

    def places(outputs):
        return len({t.untyped_storage().data_ptr() for t in outputs})

    x, w = torch.randn(4, 16), torch.randn(16, 8)
    stock, ours = (torch.compile(function, backend=b)(x, w) for b in ("inductor", "coda"))
    for outputs in (ours, Harness().run(function, x, w)):
        assert places(outputs) >= places(stock)
        torch.testing.assert_close(tuple(outputs), function(x, w))


def test_the_backward_pass_leaves_returned_logits_alone(monkeypatch):
    """Torch gives a saved tensor's memory away if no output seems to share it."""
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 0)

    def function(x, w, labels):
        logits = F.linear(x, w)
        return F.cross_entropy(logits.view(-1, 96), labels), logits

    options = {"gate": "always", "disable": ["cross_entropy"]}
    x, w = (randn(*shape, dtype=torch.float32).requires_grad_() for shape in ((2, 6, 16), (96, 16)))
    loss, logits = torch.compile(function, backend="coda", options=options)(x, w, torch.arange(12))
    kept = logits.detach().clone()
    loss.backward()
    assert torch.equal(logits, kept)
