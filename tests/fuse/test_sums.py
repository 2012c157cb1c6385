# SPDX-License-Identifier: Apache-2.0
"""A sum of GEMMs is one GEMM: which sums join, how, and which do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, leave_custom_ops, randn
from harness import Harness

from coda_inductor.graph.edit import CycleError, settle
from coda_inductor.mainloop import availability
from coda_inductor.runtime import pool
from coda_inductor.select import gate
from coda_inductor.select.policy import Policy

D, HIDDEN = 16, 24


def calls(harness):
    """(terms, K of each, stores) of every fused call, in graph order."""
    found = [n for n in harness.graph.nodes if "gemm_epilogue" in str(n.target)]
    return [[a.meta["val"].shape[1] for a in n.args[0]] for n in found]


def products(*widths):
    """Two-dimensional factors x_i (6, K_i) and w_i (D, K_i), in this order."""
    return [randn(6, k) for k in widths] + [randn(D, k) for k in widths]


def two(x, y, v, w):
    return torch.relu(x @ v.t() + y @ w.t())


def three(x, y, z, u, v, w):
    return torch.relu(x.sin() @ u.t() + y.sin() @ v.t() + z.sin() @ w.t())


def test_two_terms_of_one_width_are_read_where_they_lie(monkeypatch):
    leave_custom_ops(monkeypatch)
    harness = check(two, *products(8, 8))
    assert calls(harness) == [[8, 8]]
    assert harness.ops()["aten.cat.default"] == 0
    assert harness.report.sites[0].shape == (6, D, 16)  # K of both terms


def test_terms_written_by_elementwise_kernels_are_concatenated(monkeypatch):
    leave_custom_ops(monkeypatch)
    harness = check(three, *products(8, 4, 4))
    assert calls(harness) == [[16]]
    assert harness.ops()["aten.cat.default"] == 2  # the left factors, and the weights


@pytest.mark.parametrize(("widths", "joined"), [((16, 8, 8), (8, 8, 16)), ((64, 64), ())])
def test_the_gate_is_told_what_is_copied_at_every_call(widths, joined, monkeypatch):
    """The weights of a concatenated sum; nothing where both terms are read in place."""
    seen = []
    loses = gate.loses

    def spy(site, *us):
        seen.append(tuple(sorted(site.copied)))
        return loses(site, *us)

    monkeypatch.setattr(gate, "loses", spy)
    monkeypatch.setattr(Policy, "_kernels", lambda *_: True)
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    monkeypatch.setattr(pool, "wait", dict.fromkeys)
    function = three if len(widths) == 3 else two
    check(function, *(t.bfloat16() for t in products(*widths)))
    assert joined in seen


def test_terms_in_memory_are_not_copied_together(monkeypatch):
    leave_custom_ops(monkeypatch)

    def function(x, y, z, u, v, w):
        return torch.relu(x @ u.t() + y @ v.t() + z @ w.t())

    harness = check(function, *products(8, 4, 4))
    assert harness.ops()["aten.cat.default"] == 0
    assert [8, 4, 4] not in calls(harness)


def test_terms_that_a_gemm_writes_are_not_copied_together(monkeypatch):
    leave_custom_ops(monkeypatch)

    def function(x, y, u, v, w):
        left = F.linear(x, w).relu()
        return torch.relu(left @ u.t() + y.sin() @ v.t())

    x, y = randn(6, D), randn(6, 4)
    harness = check(function, x, y, randn(D, HIDDEN), randn(D, 4), randn(HIDDEN, D))
    assert harness.ops()["aten.cat.default"] == 0


def other_reader(x, y, v, w):
    product = x @ v.t()
    return torch.relu(product + y @ w.t()), product


def own_double(x, y, v, w):
    product = x @ v.t()
    return torch.relu(product + product) + y @ w.t()


def difference(x, y, v, w):
    return torch.relu(x @ v.t() - y @ w.t())


def weighted(x, y, v, w):
    return torch.relu(torch.add(x @ v.t(), y @ w.t(), alpha=2))


def broadcast(x, y, v, w):
    return torch.relu(x @ v.t() + y[:1] @ w.t())


@pytest.mark.parametrize(
    "function",
    [other_reader, own_double, difference, weighted, broadcast],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("custom", [False, True])
def test_what_is_no_plain_sum_does_not_join(function, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch)
    harness = check(function, *products(8, 8))
    assert all(len(terms) == 1 for terms in calls(harness))


def test_sum_is_joined_and_read_again(monkeypatch):
    leave_custom_ops(monkeypatch)

    def function(x, y, v, w):
        total = x @ v.t() + y @ w.t()
        return total.relu(), total, total.sum(-1)

    assert calls(check(function, *products(8, 8))) == [[8, 8]]


def test_sum_of_four_of_one_width(monkeypatch):
    leave_custom_ops(monkeypatch)

    def function(a, b, c, d, s, t, u, v):
        return torch.relu((a @ s.t() + b @ t.t()) + (c @ u.t() + d @ v.t()))

    harness = check(function, *products(8, 8, 8, 8))
    assert all(len(terms) <= 2 for terms in calls(harness))


def test_other_readers_of_a_concatenated_factor_read_its_slice(monkeypatch):
    leave_custom_ops(monkeypatch)

    def function(x, y, z, u, v, w):
        first = x.sin()
        total = torch.relu(first @ u.t() + y.sin() @ v.t() + z.sin() @ w.t())
        return total, first, first.t() @ total

    harness = check(function, *products(8, 4, 4))
    assert harness.ops()["aten.slice.Tensor"] >= 1


def test_dtypes_may_differ_between_the_terms_and_their_sum():
    def function(x, y, v, w):
        return (x @ v.t()).float() + (y @ w.t()).float() + 1

    args = [t.bfloat16() for t in products(8, 8)]
    check(function, *args, tolerance=3e-2)


def test_terms_of_two_dtypes_do_not_join(monkeypatch):
    leave_custom_ops(monkeypatch)

    def function(x, y, v, w):
        return torch.relu((x @ v.t()).double() + y @ w.t())

    x, y, v, w = products(8, 8)
    harness = check(function, x.float(), y, v.float(), w, tolerance=1e-5)
    assert all(len(terms) == 1 for terms in calls(harness))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("custom", [False, True])
def test_gradient_of_a_tensor_behind_two_linears(custom, dynamic, monkeypatch):
    """Gate and up: two gradients of one width; q, k and v: three, of two widths."""
    if custom:
        leave_custom_ops(monkeypatch)

    def gate_up(x, gate, up):
        h = x.sin()
        return F.linear(h, gate).sigmoid() * F.linear(h, up)

    def qkv(x, q, k, v):
        h = torch.tanh(x)
        q, k, v = F.linear(h, q), F.linear(h, k), F.linear(h, v)
        return q.softmax(-1), (k * v).cumsum(0)

    x = randn(2, 3, D).requires_grad_()
    harness = check_gradients(
        Weights(gate_up, randn(HIDDEN, D), randn(HIDDEN, D)), x, dynamic=dynamic
    )
    if custom:
        assert [HIDDEN, HIDDEN] in calls(harness)
    weights = [randn(n, D) for n in (D, 8, 8)]
    harness = check_gradients(Weights(qkv, *weights), x, dynamic=dynamic)
    if custom:
        assert [D + 8 + 8] in calls(harness)


def test_product_of_forward_values_in_the_backward_pass(monkeypatch):
    leave_custom_ops(monkeypatch)

    class Add(torch.autograd.Function):
        """x; its gradient has a product of forward values added."""

        @staticmethod
        def forward(ctx, x, v):
            ctx.save_for_backward(x, v)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            x, v = ctx.saved_tensors
            return gradient @ v + x @ v, None

    def function(x, v):
        return Add.apply(x @ v, v)

    harness = check_gradients(function, randn(4, D).requires_grad_(), randn(D, D))
    assert [D] in calls(harness)
    assert all(len(terms) <= 2 for terms in calls(harness))


PAIRWISE = {
    "all pairs summed": lambda t: t.sum((0, 1)),
    "largest of all pairs": lambda t: t.amax((0, 1)),
    "elementwise": torch.tanh,
    "returned": lambda t: t,
}


@pytest.mark.parametrize("name", PAIRWISE)
def test_a_sum_that_broadcasts_is_no_sum_of_products(name):
    """Additive attention: every row of one product plus every row of the other."""

    def pairs(x, v, w):
        return PAIRWISE[name]((x @ v.t())[:, None, :] + (x @ w.t())[None, :, :])

    check(pairs, randn(4, D), randn(D, D), randn(D, D))


def test_what_is_concatenated_is_returned_as_it_was():
    """Not as a slice of a buffer that holds the other terms too."""

    def returned(x, u, v, w):
        a, b, c = x + 1, x * 2, x.tanh()
        return a @ u.t() + b @ v.t() + c @ w.t(), a, b.view(3, 2, D), c

    harness = Harness()
    outputs = harness.run(returned, randn(6, D), randn(D, D), randn(D, D), randn(D, D))
    assert harness.ops()["aten.cat.default"] == 2
    assert all(t.is_contiguous() for t in outputs)
    assert len({t.untyped_storage().data_ptr() for t in outputs}) == 4


class Gates(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(D, HIDDEN).double() for _ in range(3))

    def forward(self, x):
        return F.gelu(self.a(x) + self.b(x).sigmoid() + 2 * self.c(x))


class Readers(torch.nn.Module):
    """Norms that linears of several widths read."""

    def __init__(self):
        super().__init__()
        self.o, self.rms, self.layer = (
            torch.nn.Linear(D, D), torch.nn.RMSNorm(D), torch.nn.LayerNorm(D),
        )  # fmt: skip
        self.a, self.b, self.c = (torch.nn.Linear(D, n) for n in (24, 40, 8))

    def forward(self, x):
        h = x + self.o(x)
        n, m = self.rms(h), self.layer(h)
        return self.a(n), self.b(n), self.c(n), self.a(m), self.b(m)


@pytest.mark.timeout(60)
def test_left_factors_that_are_made_of_each_other_close_no_cycle():
    """A left one that is read as a slice of the concatenation must not be what makes another."""

    def function(x, a, b, c):
        h = x * 2
        return h @ a + torch.relu(h) @ b + (h * h) @ c, torch.tanh(h)

    harness = check(function, randn(6, D), *(randn(D, HIDDEN) for _ in range(3)))
    assert [site.shape for site in harness.fused] == [(6, HIDDEN, 3 * D)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Gates, Readers])
def test_gradients_of_sums_close_no_cycle(model):
    harness = check_gradients(model().double(), randn(6, D).requires_grad_())
    assert harness.fused


def test_a_cycle_is_an_error_and_no_endless_loop():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch.cos, (first,))
    first.args = (second,)
    with pytest.raises(CycleError, match="would depend on itself"):
        settle([second])


def test_settling_puts_every_reader_after_what_it_reads():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.sin, (x,)) for _ in range(6)]
    output = graph.output((nodes[1], nodes[5]))
    for reader, read in ((0, 5), (1, 0), (2, 4), (3, 5), (4, 3), (5, 5)):
        if reader != read:
            nodes[reader].args = (nodes[read],)
    settle([nodes[5]])
    graph.lint()
    assert output is list(graph.nodes)[-1]
