# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts are found however they are written, and fused in both directions; what is no
such block stays as it is, with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from experts import (
    COUNTS,
    GATHERS,
    SORTS,
    SUMS,
    Block,
    D,
    E,
    K,
    given,
    halves,
    histogram_of_all,
    interleaved,
    inverse_of,
    no_gate,
    scattered,
    two_weights,
    unweighted,
    viewed,
)
from passes import codes

from coda_inductor.semantic.experts import COMBINE, ROUTE, WGRAD


def count(harness, op) -> int:
    return harness.ops()[str(op)]


def fused(harness) -> list[str]:
    """Of each grouped site, how it multiplies."""
    sites = [s.program for s in harness.fused if s.program.grouped]
    return ["gathered " * (p.routes[1] is not None) + ("pair" if p.paired else "") for p in sites]


ALL = [
    *({"sort": each} for each in SORTS),
    *({"count": each} for each in COUNTS),
    *({"gather": each} for each in GATHERS),
    *({"sum": each} for each in SUMS),
]


@pytest.mark.parametrize(
    "how", ALL, ids=lambda how: "-".join(getattr(v, "__name__", v) for v in how.values())
)
def test_every_spelling(how):
    """Algebra: gradients in float64 are eager's; the counters are one a block."""
    harness = check_gradients(Block(**how), *given())
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1
    assert fused(harness) == ["gathered pair", "", "gathered ", ""]
    assert [count(harness, op) for op in (ROUTE, COMBINE, WGRAD)] == [1, 2, 2]
    assert not [op for op in harness.ops() if "sort" in op or "cumsum" in op or "scatter_add" in op]


@pytest.mark.parametrize(
    ("up", "paired"), [(two_weights, "pair"), (no_gate, ""), (interleaved, "")]
)
def test_every_gate(up, paired):
    harness = check_gradients(Block(up=up), *given())
    assert harness.counts["experts"] == 1
    assert fused(harness) == [f"gathered {paired}", "", "gathered ", ""]


@pytest.mark.parametrize("mm", [F.grouped_mm, torch._grouped_mm], ids=["F", "torch"])
def test_torchs_own_products(mm):
    """In bfloat16, which they take."""

    def product(x, w, offs):
        return mm(x, w, offs=offs)

    dtype = torch.bfloat16
    harness = check_gradients(Block(mm=product, dtype=dtype), *given(dtype=dtype))
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1


def test_a_float32_stream_under_autocast():
    """The sum by token is float32 where the products are not."""

    def product(x, w, offs):
        return torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=offs)

    block = Block(mm=product, dtype=torch.float32)
    harness = check_gradients(Autocast(block), *given(dtype=torch.float32), tolerance=3e-2)
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1


class Autocast(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(*inputs)


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (1, 1), (1, 5), (33, 3)])
def test_sizes(tokens, k):
    harness = check_gradients(Block(), *given(tokens, k))
    assert harness.counts["experts"] == 1


def test_all_tokens_to_one_expert():
    x, ids, w = given(9)
    assert check_gradients(Block(), x, torch.full_like(ids, 3), w).counts["experts"] == 1


@pytest.mark.parametrize("biased", [False, True])
def test_pairs_of_no_expert(biased):
    """They add nothing, in either direction: what masks them goes."""
    x, ids, w = given(9)
    ids[::3, 1] = E
    harness = check_gradients(Block(masked=True, biased=biased), x, ids, w)
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1
    assert fused(harness)[0] == "gathered pair"


@pytest.mark.parametrize("sum_", [viewed, scattered, unweighted])
def test_a_bias_of_each_expert(sum_):
    """A token's sum of them is added behind the sum of its rows."""
    harness = check_gradients(Block(biased=True, sum=sum_), *given())
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1


def test_a_bias_behind_a_mask_stays():
    """It would be added to the zeros of pairs of no expert."""

    class Late(Block):
        def forward(self, x, ids, w):
            perm, flat = torch.argsort(ids.reshape(-1)), ids.reshape(-1)
            offs = torch.cumsum(histogram_of_all(flat, perm), 0, dtype=torch.int32)
            mask, rows = (flat[perm] >= E)[:, None], x[perm // ids.shape[1]]
            y = self.mm(halves(rows, offs, self.mm, self.w13), self.w2.mT, offs)
            y = y.masked_fill(mask, 0.0) + self.bias[flat[perm].clamp(max=E - 1)]
            return viewed(y, w, perm, x, ids.shape[1])

    x, ids, w = given(9)
    ids[::3, 1] = E
    assert not check(Late(biased=True), x, ids, w).counts["experts"]


@pytest.mark.parametrize(("least", "number"), [(E, 1.0), (E - 1, 0.0)])
def test_another_mask_stays(least, number):
    """Of other rows, or with another number than nothing."""

    class Masked(Block):
        def forward(self, x, ids, w):
            perm, flat = torch.argsort(ids.reshape(-1)), ids.reshape(-1)
            offs = torch.cumsum(histogram_of_all(flat, perm), 0, dtype=torch.int32)
            y = halves(x[perm // ids.shape[1]], offs, self.mm, self.w13)
            y = self.mm(y, self.w2.mT, offs)
            y = y.masked_fill((flat[perm] >= least)[:, None], number)
            return viewed(y, w, perm, x, ids.shape[1])

    harness = check_gradients(Masked(), *given(9))
    assert not harness.counts["experts"]


def test_a_bias_in_another_order_stays():
    block = Block(biased=True)

    def function(x, ids, w):
        perm, k = torch.argsort(ids.reshape(-1)), ids.shape[1]
        offs = torch.cumsum(histogram_of_all(ids.reshape(-1), perm), 0, dtype=torch.int32)
        y = block.mm(halves(x[perm // k], offs, block.mm, block.w13), block.w2.mT, offs)
        return viewed(y + block.bias[ids.reshape(-1)], w, perm, x, k)

    harness = check(function, *given())
    assert not harness.counts["experts"]
    assert "experts-sum" in codes(harness)


def test_inference():
    harness = check(Block(), *given())
    assert harness.counts["experts"] == 1
    assert fused(harness) == ["gathered pair", ""]


def test_tokens_are_dynamic():
    """One graph serves every number of them."""
    block, router = Block(), randn(E, D)

    def routed(x):
        w, ids = torch.topk(F.linear(x, router).softmax(-1), K)
        return block(x, ids, w)

    harness = check(routed, randn(7, D), dynamic=True)
    assert harness.counts["experts"] == 1
    compiled = torch.compile(routed, backend=harness, dynamic=True)
    with torch.no_grad():
        for x in (randn(5, D), randn(12, D)):
            torch.testing.assert_close(compiled(x), routed(x))
    assert harness.graphs == 1


def test_frozen_weights():
    harness = check_gradients(Block().requires_grad_(False), *given())
    assert count(harness, WGRAD) == 0
    assert harness.counts["experts_backward"] == 1


def test_only_the_weights_are_trained():
    x, ids, w = given()
    harness = check_gradients(Block(), x.detach(), ids, w.detach())
    assert [count(harness, op) for op in (COMBINE, WGRAD)] == [1, 2]


def test_what_is_not_fused_multiplies_as_it_was_written():
    """One product a weight, forward and backward, and a cat of the gradients."""
    harness = check_gradients(Block(), *given(), gate="never")
    products = [op for op in harness.ops().elements() if "grouped_plain" in op]
    assert len(products) == 4
    assert harness.counts["experts"] == 1
    assert not harness.counts["experts_backward"]


@pytest.mark.parametrize("name", ["experts", "experts_backward"])
def test_disabled(name):
    harness = check_gradients(Block(), *given(), disable=[name])
    assert not harness.counts[name]


def weighted_before(block):
    def forward(x, ids, w):
        perm = torch.argsort(ids.reshape(-1))
        offs = torch.cumsum(histogram_of_all(ids.reshape(-1), perm), 0, dtype=torch.int32)
        rows = x[perm // ids.shape[1]] * w.reshape(-1)[perm, None]
        y = block.mm(halves(rows, offs, block.mm, block.w13), block.w2.mT, offs)
        return y[inverse_of(perm)].view(x.shape[0], -1, D).sum(1)

    return forward


def test_rows_that_were_weighted_before():
    """An activation of a product times a weight is not the weight times it: rows lie in order."""
    block = Block()
    harness = check(weighted_before(block), *given())
    assert not harness.counts["experts"]
    assert fused(harness) == ["pair", ""]


class Alone(torch.nn.Module):
    """Experts of rows that came in order, as behind an exchange with other ranks."""

    def __init__(self, up):
        super().__init__()
        self.block = Block(up=up)

    def forward(self, rows, counts):
        block, offs = self.block, torch.cumsum(counts, 0, dtype=torch.int32)
        a = block.up(rows, offs, block.mm, block.w13, block.w1, block.w3)
        return block.mm(a, block.w2.mT, offs)


@pytest.mark.parametrize("up", [halves, two_weights])
def test_rows_that_lie_in_order(up):
    counts = torch.tensor([3, 0, 4, 1, 0])
    harness = check_gradients(Alone(up), randn(8, D).requires_grad_(), counts)
    assert fused(harness) == ["pair", "", "", ""]
    assert count(harness, ROUTE) == count(harness, COMBINE) == 0
    assert count(harness, WGRAD) == (2 if up is halves else 3)
    assert sum(site.program.loads != () for site in harness.fused) == 1  # the gate's gradient


def largest(y, w, perm, x, k):
    return y[inverse_of(perm)].view(x.shape[0], k, D).amax(1)


def in_sorted_order(y, w, perm, x, k):
    return y.view(x.shape[0], k, D).sum(1)


def by_another_inverse(y, w, perm, x, k):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0] - 1, -1, -1)
    return y[inverse].view(x.shape[0], k, D).sum(1)


def onto_other_tokens(y, w, perm, x, k):
    return torch.zeros_like(x).index_add(0, perm % x.shape[0], y)


def weighted_in_another_order(y, w, perm, x, k):
    y = y * w.reshape(-1, 1)
    return y[inverse_of(perm)].view(x.shape[0], k, D).sum(1)


@pytest.mark.parametrize(
    "sum_",
    [largest, in_sorted_order, by_another_inverse, onto_other_tokens, weighted_in_another_order],
)
def test_a_sum_that_is_none(sum_):
    harness = check_gradients(Block(sum=sum_), *given())
    assert "experts-sum" in codes(harness)
    assert not harness.counts["experts"]
    assert "gathered pair" in fused(harness)


@pytest.mark.parametrize(
    "change",
    [
        lambda perm: perm.flip(0),  # sorted downwards
        lambda perm: perm + 0,  # a value that is computed
    ],
)
def test_another_order_stays(change):
    harness = check_gradients(Block(sort=lambda ids: change(torch.argsort(ids))), *given())
    assert not harness.counts["experts"]
    assert count(harness, ROUTE) == 0


def test_downwards_stays():
    harness = check(Block(sort=lambda ids: torch.argsort(ids, descending=True)), *given())
    assert count(harness, ROUTE) == 0


@pytest.mark.parametrize(
    "count_",
    [
        lambda ids, _: histogram_of_all(ids * 0, None),  # of other ids
        lambda ids, _: torch.histc(ids.float(), bins=E, min=0, max=2 * E),  # of two at a time
        lambda ids, _: torch.histc(ids.float(), bins=E, min=1, max=E),
    ],
)
def test_counts_of_others_stay(count_):
    assert count(check(Block(count=count_), *given()), ROUTE) == 0


def test_what_is_changed_in_place_stays():
    block = Block()

    def function(x, ids, w):
        k, flat = ids.shape[1], ids.reshape(-1)
        perm = torch.argsort(flat)
        offs = torch.cumsum(histogram_of_all(flat, perm), 0, dtype=torch.int32)
        rows = x[perm // k]
        x.mul_(2)
        a = halves(rows, offs, block.mm, block.w13)
        return scattered(block.mm(a, block.w2.mT, offs), w, perm, x, k)

    x, ids, w = given()
    harness = check(function, x.detach(), ids, w)
    assert "mutation" in codes(harness)
    assert count(harness, ROUTE) == 0
