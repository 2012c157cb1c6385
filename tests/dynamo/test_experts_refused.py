# SPDX-License-Identifier: Apache-2.0
"""What is no mixture of experts, or not all of one, stays as it is, with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from experts import (
    Block,
    D,
    E,
    count,
    fused,
    given,
    halves,
    histogram_of_all,
    inverse_of,
    multiplied,
    plain,
    scattered,
    two_weights,
    viewed,
    weighted_last,
)
from passes import codes

from coda_inductor.semantic.experts import COMBINE, ROUTE, WGRAD, grouped_mm


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


class Written(Block):
    """Halves and a view, with what ``change`` does to the sorted rows and their order."""

    def __init__(self, change=lambda rows, perm, own: (rows, perm), **how):
        super().__init__(**how)
        self.change = change

    def forward(self, x, ids, w):
        k, flat = ids.shape[1], ids.reshape(-1)
        own, perm = torch.sort(flat)
        offs = torch.cumsum(histogram_of_all(flat, perm), 0, dtype=torch.int32)
        rows, perm = self.change(x[perm // k], perm, own)
        a = halves(rows, offs, self.mm, self.w13)
        y = self.mm(a, self.w2.mT, offs) * w.reshape(-1)[perm, None]
        return y[inverse_of(perm)].view(-1, k, D).sum(1)


def test_a_mask_that_somebody_sees_stays():
    """What is zero for pairs of no expert stays so where it is read."""

    class Seen(Block):
        def forward(self, x, ids, w):
            k, flat = ids.shape[1], ids.reshape(-1)
            own, perm = torch.sort(flat, stable=True)
            offs = torch.cumsum(histogram_of_all(flat, perm), 0, dtype=torch.int32)
            mask = (own >= E)[:, None]
            z = self.mm(x[perm // k], self.w13.transpose(1, 2), offs).masked_fill(mask, 0.0)
            gate, up = z.chunk(2, -1)
            y = self.mm(gate.sigmoid() * up, self.w2.mT, offs).masked_fill(mask, 0.0)
            return viewed(y, w, perm, x, k), z.exp()

    x, ids, w = given(9)
    ids[::3, 1] = E
    harness = check_gradients(Seen(), x, ids, w)
    assert harness.counts["experts"] == 1
    assert sum(node.target == "masked_fill" for node in harness.raised.nodes) == 1


def test_as_written():
    assert check_gradients(Written(), *given()).counts["experts"] == 1


def test_rows_that_are_masked_otherwise_stay():
    def masked(rows, perm, own):
        return rows.masked_fill((own >= E - 1)[:, None], 0.0), perm

    assert count(check_gradients(Written(masked), *given()), ROUTE) == 0


def test_an_order_that_is_changed_in_place_stays():
    def turned(rows, perm, own):
        perm.copy_(perm.flip(0))
        return rows, perm

    harness = check_gradients(Written(turned), *given())
    assert count(harness, ROUTE) == 0
    assert "mutation" in codes(harness)


def test_more_rows_than_tokens_stay():
    """Those that no token is of have a gradient too."""
    x, ids, w = given()
    harness = check_gradients(
        Written(), torch.cat([x.detach(), x.detach()]).requires_grad_(), ids, w
    )
    assert count(harness, ROUTE) == 0


def test_a_product_of_another_dtype_stays():
    def product(x, w, offs):
        return torch._grouped_mm(x, w, offs=offs, out_dtype=torch.bfloat16)

    how = {"dtype": torch.bfloat16}
    assert count(check(Written(mm=product, **how), *given(**how)), ROUTE) == 0


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


def of_two_tokens(y, w, perm, x, k):
    return y[inverse_of(perm)].view(-1, 2 * k, D).sum(1)


def weighted_twice(y, w, perm, x, k):
    return viewed(y * w.reshape(-1)[perm, None], w, perm, x, k)


@pytest.mark.parametrize(
    "sum_",
    [
        *(largest, in_sorted_order, by_another_inverse, onto_other_tokens),
        *(weighted_in_another_order, weighted_twice, of_two_tokens),
    ],
)
def test_a_sum_that_is_none(sum_):
    harness = check_gradients(Block(sum=sum_), *given(8))
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


def test_weights_that_change_before_the_sum_stay():
    def function(block, x, ids, w):
        perm, k = torch.argsort(ids.reshape(-1)), ids.shape[1]
        offs = torch.cumsum(histogram_of_all(ids.reshape(-1), perm), 0, dtype=torch.int32)
        y = block.mm(halves(x[perm // k], offs, block.mm, block.w13), block.w2.mT, offs)
        y = y * w.reshape(-1)[perm, None]
        w.mul_(2)
        return y[inverse_of(perm)].view(-1, k, D).sum(1)

    block, (x, ids, w) = Block(), given()
    harness = check(lambda *args: function(block, *args), x, ids, w.detach())
    assert "mutation" in codes(harness)
    assert not harness.counts["experts"]


def edges(*rows):
    return torch.tensor([0, *rows]).cumsum(0).to(torch.int32)


A, B = edges(2, 0, 3), edges(1, 3, 1)
X, LEFT, RIGHT = randn(5, 16), randn(3, 16, 24), randn(3, 16, 24)


@pytest.mark.parametrize("combine", [torch.mul, torch.add])
def test_products_by_two_groupings_share_no_tile(combine):
    def function(x, left, right, a, b):
        return combine(grouped_mm(x, left, a, None), grouped_mm(x, right, b, None))

    harness = check(function, X, LEFT, RIGHT, A, B)
    assert not any(site.program.paired for site in harness.fused)


def test_a_value_of_a_column_is_no_experts():
    vector = randn(24)
    harness = check(lambda x, w, a: grouped_mm(x, w, a, None).sin() * vector, X, LEFT, A)
    assert "grouped-row" in str([site.stops for site in harness.fused])


def test_sums_over_rows_are_no_experts():
    harness = check(lambda x, w, a: grouped_mm(x, w, a, None).sin().sum(0), X, LEFT, A)
    assert not any(site.program.reduces for site in harness.fused)


@pytest.mark.parametrize("sum_", [viewed, weighted_last, multiplied])
def test_a_gradient_that_was_stopped_stays_stopped(sum_):
    """``detach`` is no other name of weights, nor of rows: nothing flows through it."""

    def of_weights(y, w, perm, x, k):
        return sum_(y, w.detach(), perm, x, k) * w.sum()

    def of_rows(y, w, perm, x, k):
        y = y[torch.argsort(perm)].view(-1, k, x.shape[1]).detach()
        return (y * w.unsqueeze(-1)).sum(1) + x

    for each in (of_weights, of_rows):
        check_gradients(Block(sum=each), *given(9))


def test_ends_that_change_between_products_stay():
    """Of rows that lie in order: the second product reads other ends."""

    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(randn(2, D, D))

        def forward(self, x, sizes):
            offs = torch.cumsum(sizes, 0, dtype=torch.int32)
            y = plain(x, self.w, offs)
            offs[0] = 5
            return y + plain(x, self.w, offs)

    check(Alone(), randn(9, D), torch.tensor([3, 6], dtype=torch.int32))


def half(y, w, perm, x, k):
    return torch.zeros_like(x).scatter_add(0, (perm // k)[:, None].expand(-1, D // 2), y)


def across(y, w, perm, x, k):
    return torch.zeros_like(x).scatter_add(0, (perm // k).expand(D, -1), y)


@pytest.mark.parametrize("sum_", [half, across])
def test_a_sum_of_other_elements_stays(sum_):
    """An index of less columns, or of one number a column."""
    harness = check(Block(sum=sum_), *(t.detach() for t in given(D // 2)))
    assert "experts-sum" in codes(harness)


@pytest.mark.parametrize(
    "pick", [lambda i: i[:, None].expand(-1, D // 2), lambda i: i.expand(D, -1)]
)
def test_rows_of_other_elements_stay(pick):
    class Picked(Block):
        def forward(self, x, ids, w):
            k, perm = ids.shape[1], torch.argsort(ids.reshape(-1))
            offs = torch.cumsum(histogram_of_all(ids.reshape(-1), perm), 0, dtype=torch.int32)
            rows = torch.gather(x, 0, pick(perm // k))
            a = halves(rows, offs, self.mm, self.w13[..., : rows.shape[1]])
            return scattered(self.mm(a, self.w2.mT, offs), w, perm, x, k)

    assert count(check_gradients(Picked(), *given(D // 2)), ROUTE) == 0


def test_who_has_tokens_is_no_loop():
    """Without a loop that the mask is left to."""

    def hit(x, ids, w):
        mask = F.one_hot(ids, E + 1).permute(2, 1, 0)
        return torch.greater(mask.sum(dim=(-1, -2)), 0), w.sum() * mask.float().mean()

    assert not codes(check(hit, *(t.detach() for t in given())))
