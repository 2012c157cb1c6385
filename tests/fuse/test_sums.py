# SPDX-License-Identifier: Apache-2.0
"""A sum of GEMMs is one GEMM: which sums join, how, and which do not."""

from graphlib import CycleError

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, leave_custom_ops, randn
from harness import Harness
from torch._inductor.utils import run_and_get_code

from coda_inductor.fuse import sums
from coda_inductor.graph.edit import reorder
from coda_inductor.mainloop import availability
from coda_inductor.plan import Plan
from coda_inductor.runtime import pool
from coda_inductor.select import choice as gate

D, HIDDEN = 16, 24


def calls(harness):
    """K of each term of every fused call, in graph order."""
    found = [n for n in harness.graph.nodes if "gemm_epilogue" in str(n.target)]
    return [[a.meta["val"].shape[1] for a in n.args[0]] for n in found]


def products(*widths):
    """Two-dimensional factors x_i (6, K_i) and w_i (D, K_i), in this order."""
    return [randn(6, k) for k in widths] + [randn(D, k) for k in widths]


def two(x, y, v, w):
    total = x @ v.t() + y @ w.t()
    return total.relu(), total, total.sum(-1)


def three(x, y, z, u, v, w):
    return torch.relu(x.sin() @ u.t() + y.sin() @ v.t() + z.sin() @ w.t())


def read_again(x, y, z, u, v, w):
    """What is concatenated has other readers: they read its slice."""
    first = x.sin()
    total = torch.relu(first @ u.t() + y.sin() @ v.t() + z.sin() @ w.t())
    return total, first, first.t() @ total


def of_a_gemm(x, y, v, w):
    """Factors that another GEMM writes are not copied either."""
    left = F.linear(x, v).relu()
    return torch.relu(left @ v.t() + y.sin() @ w.t())


#: (function, widths, K of the terms of the sum's call, concatenations: left factors, weights).
SUMS = [
    (two, (8, 8), [8, 8], 0), (three, (8, 4, 4), [16], 2),
    (
        lambda a, b, c, d, s, t, u, v: ((a @ s.t() + b @ t.t()) + (c @ u.t() + d @ v.t())).relu(),
        (8, 8, 8, 8), [8, 8], 0,
    ),
    (read_again, (8, 4, 4), [16], 2), (of_a_gemm, (D, 4), [D], 0),
    # Factors in memory would only be copied.
    (lambda x, y, z, u, v, w: torch.relu(x @ u.t() + y @ v.t() + z @ w.t()), (8, 4, 4), [8], 0),
]  # fmt: skip


@pytest.mark.parametrize(("function", "widths", "terms", "copies"), SUMS)
def test_which_terms_join_in_place_and_which_are_concatenated(
    function, widths, terms, copies, monkeypatch
):
    leave_custom_ops(monkeypatch)
    harness = check(function, *products(*widths))
    assert terms in calls(harness)
    assert (
        harness.ops()["aten.cat.default"] + harness.ops()["coda_inductor.columns.default"] == copies
    )
    assert all(len(each) <= 2 for each in calls(harness))
    assert max(site.shape[2] for site in harness.report.sites) == sum(terms)


@pytest.mark.parametrize(("widths", "joined"), [((16, 8, 8), (8, 8, 16)), ((64, 64), ())])
def test_the_gate_is_told_what_is_copied_at_every_call(widths, joined, monkeypatch):
    """The weights of a concatenated sum; nothing where both terms are read in place."""
    seen = []
    loses = gate.loses

    def spy(site, *us):
        seen.append(tuple(sorted(site.copied)))
        return loses(site, *us)

    monkeypatch.setattr(gate, "loses", spy)
    monkeypatch.setattr(Plan, "on_kernels", lambda *_: True)
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    monkeypatch.setattr(pool, "wait", dict.fromkeys)
    function = three if len(widths) == 3 else two
    check(function, *(t.bfloat16() for t in products(*widths)))
    assert joined in seen


NO_SUMS = {
    "other reader": lambda x, y, v, w: (torch.relu((p := x @ v.t()) + y @ w.t()), p),
    "own double": lambda x, y, v, w: torch.relu((p := x @ v.t()) + p) + y @ w.t(),
    "difference": lambda x, y, v, w: torch.relu(x @ v.t() - y @ w.t()),
    "broadcast": lambda x, y, v, w: torch.relu(x @ v.t() + y[:1] @ w.t()),
    # Additive attention: every row of one product plus every row of the other.
    "all pairs": lambda x, y, v, w: (
        (pairs := (x @ v.t())[:, None, :] + (y @ w.t())[None, :, :]).tanh(),
        pairs.sum((0, 1)),
        pairs.amax((0, 1)),
    ),
    "two dtypes": lambda x, y, v, w: torch.relu(
        (x.bfloat16() @ v.bfloat16().t()).float() + y.float() @ w.float().t()
    ),
    "of their sum's dtype": lambda x, y, v, w: (
        (x.float() @ v.float().t()).double() + (y.float() @ w.float().t()).double() + 1
    ),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_plain_sum_does_not_join(name, monkeypatch):
    leave_custom_ops(monkeypatch)
    tolerance = 3e-2 if name == "two dtypes" else 1e-5
    harness = check(NO_SUMS[name], *products(8, 8), tolerance=tolerance)
    assert all(len(terms) == 1 for terms in calls(harness))


def qkv(x, q, k, v):
    h = torch.tanh(x)
    q, k, v = F.linear(h, q), F.linear(h, k), F.linear(h, v)
    return q.softmax(-1), (k * v).cumsum(0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("function", "widths", "terms"), [
    (lambda x, gate, up: F.linear(h := x.sin(), gate).sigmoid() * F.linear(h, up),
     (HIDDEN, HIDDEN), [HIDDEN, HIDDEN]),
    (qkv, (D, 8, 8), [D + 8 + 8]),
])  # fmt: skip
def test_gradient_of_a_tensor_behind_linears(function, widths, terms, dynamic, monkeypatch):
    """Gradients of one width, and of two."""
    leave_custom_ops(monkeypatch)
    model = Weights(function, *(randn(n, D) for n in widths))
    harness = check_gradients(model, randn(2, 3, D).requires_grad_(), dynamic=dynamic)
    assert terms in calls(harness)


def test_what_is_concatenated_is_returned_as_it_was():
    """Not as a slice of a buffer that holds the other terms too."""

    def returned(x, u, v, w):
        a, b, c = x + 1, x * 2, x.tanh()
        return a @ u.t() + b @ v.t() + c @ w.t(), a, b.view(3, 2, D), c

    harness = Harness()
    outputs = harness.run(returned, randn(6, D), randn(D, D), randn(D, D), randn(D, D))
    assert harness.ops()["aten.cat.default"] == harness.ops()["coda_inductor.columns.default"] == 1
    assert all(t.is_contiguous() for t in outputs)
    assert len({t.untyped_storage().data_ptr() for t in outputs}) == 4


def test_left_factors_that_are_made_of_each_other_close_no_cycle():
    """A left one that is read as a slice of the concatenation must not be what makes another."""

    def function(x, a, b, c):
        h = x * 2
        return h @ a + torch.relu(h) @ b + (h * h) @ c, torch.tanh(h)

    harness = check(function, randn(6, D), *(randn(D, HIDDEN) for _ in range(3)))
    assert [site.shape for site in harness.fused] == [(6, HIDDEN, 3 * D)]


def test_a_cycle_is_an_error_and_no_endless_loop():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch.cos, (first,))
    first.args = (second,)
    with pytest.raises(CycleError):
        reorder([second])


def test_inductor_writes_each_part_where_it_belongs():
    """A kernel for each, none for all: that one would evaluate every part of every element."""
    sums.install()

    def function(x, y):
        return sums.COLUMNS([x * 2, y.sin(), x + 1])

    x, y = randn(6, 8), randn(6, 4)
    output, (code,) = run_and_get_code(torch.compile(function, dynamic=False), x, y)
    assert torch.equal(output, function(x, y))
    assert "columns" not in code.split("def call")[1]
    assert "masked" not in code


def test_products_that_are_summed_in_two_ways_share_no_tile(monkeypatch):
    def gated(x, w, v):
        return torch.sigmoid(x @ w) * (x @ v)

    ways = {}  # of GEMMs, as they are first asked about
    asked = lambda gemm: ways.setdefault(gemm, len(ways) % 2 == 0)  # noqa: E731
    monkeypatch.setattr("coda_inductor.fuse.pair.fast_accumulation", asked)
    harness = Harness()
    harness.run(gated, *(torch.randn(64, 64) for _ in range(3)))
    assert not any(site.program.paired for site in harness.fused)
