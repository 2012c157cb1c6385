# SPDX-License-Identifier: Apache-2.0
"""What is no mixture of experts, or not all of one, stays as it is, with a reason."""

import pytest
import torch
from checking import check, check_gradients, randn
from zoo import experts as zoo

from coda_inductor.semantic.experts import COMBINE, ROUTE, WGRAD, grouped_mm


class Written(zoo.Block):
    """Halves and a view, of rows that ``pick`` gives of x; ``after`` is of the second product."""

    def __init__(self, pick=lambda x, perm, k, own, w: x[perm // k], after=None, **how):
        super().__init__(**how)
        self.pick, self.after = pick, after or (lambda block, y, own, flat: y)

    def forward(self, x, ids, w):
        k, flat = ids.shape[1], ids.reshape(-1)
        own, perm = torch.sort(flat)
        offs = torch.cumsum(zoo.histogram_of_all(flat, perm), 0, dtype=torch.int32)
        rows = self.pick(x, perm, k, own, w)
        a = zoo.halves(rows, offs, self.mm, self.w13[..., : rows.shape[1]])
        y = self.after(self, self.mm(a, self.w2.mT, offs), own, flat)
        return self.sum(y, w, perm, x, k)


def bias_behind_a_mask(block, y, own, flat):
    """It would be added to the zeros of pairs of no expert."""
    return y.masked_fill((own >= zoo.E)[:, None], 0.0) + block.bias[own.clamp(max=zoo.E - 1)]


def order_changed(x, perm, k, own, w):
    perm.copy_(perm.flip(0))
    return x[perm // k]


def input_changed(x, perm, k, own, w):
    rows = x[perm // k]
    x.mul_(2)
    return rows


def of_tokens(y, perm, k):
    return y[zoo.inverse_of(perm)].view(-1, k, zoo.D)


def by_another_inverse(y, w, perm, x, k):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0] - 1, -1, -1)
    return y[inverse].view(x.shape[0], k, zoo.D).sum(1)


def weights_changed(y, w, perm, x, k):
    y = y * w.reshape(-1)[perm, None]
    w.mul_(2)
    return of_tokens(y, perm, k).sum(1)


def across(y, w, perm, x, k):
    """An index of one number a column."""
    return torch.zeros_like(x).scatter_add(0, (perm // k).expand(zoo.D, -1), y)


SUM, MUTATION = "experts-sum", "mutation"
SUMS = {
    "largest": lambda y, w, perm, x, k: of_tokens(y, perm, k).amax(1),
    "by another inverse": by_another_inverse,
    "onto other tokens": lambda y, w, perm, x, k: torch.zeros_like(x).index_add(
        0, perm % x.shape[0], y
    ),
    "added twice": lambda y, w, perm, x, k: torch.zeros_like(x).index_add(0, perm // k, y, alpha=2),
    "in fewer bits": lambda y, w, perm, x, k: of_tokens(y.float(), perm, k).sum(1),
    "weighted in another order": lambda y, w, perm, x, k: of_tokens(
        y * w.reshape(-1, 1), perm, k
    ).sum(1),
    "weighted twice": lambda y, w, perm, x, k: zoo.viewed(
        y * w.reshape(-1)[perm, None], w, perm, x, k
    ),
    "of two tokens": lambda y, w, perm, x, k: of_tokens(y, perm, 2 * k).sum(1),
}
#: Name -> (how it is written, the code of a refusal, are rows routed all the same?).
OTHERS = {
    **{name: ({"sum": how}, SUM, True) for name, how in SUMS.items()},
    "mask of other rows": (
        {"after": lambda _, y, own, flat:
         y.masked_fill((own >= zoo.E - 1)[:, None], 0.0)}, "", True,
    ),
    "mask of another number": (
        {"after": lambda _, y, own, flat:
         y.masked_fill((own >= zoo.E)[:, None], 1.0)}, "", True,
    ),
    "bias behind a mask": ({"after": bias_behind_a_mask, "biased": True}, SUM, True),
    "bias in another order": (
        {"after": lambda block, y, own, flat: y + block.bias[flat], "biased": True}, SUM, True,
    ),
    "weights changed": ({"sum": weights_changed}, MUTATION, True),
    "across": ({"sum": across}, SUM, True),
    "rows masked": (
        {"pick": lambda x, perm, k, own, w:
         x[perm // k].masked_fill((own >= zoo.E - 1)[:, None], 0.0)},
        "", False,
    ),
    "order changed": ({"pick": order_changed}, MUTATION, False),
    "input changed": ({"pick": input_changed, "sum": zoo.scattered}, MUTATION, False),
    "more rows than tokens": (
        {"sum": lambda y, w, perm, x, k: zoo.viewed(y, w, perm, x[: w.shape[0]], k)}, "", False,
    ),
    "another dtype": (
        {"mm": lambda x, w, offs: torch._grouped_mm(x, w, offs=offs, out_dtype=torch.bfloat16),
         "dtype": torch.bfloat16}, "", False,
    ),
    "rows weighted before": (
        {"pick": lambda x, perm, k, own, w: x[perm // k] * w.reshape(-1)[perm, None]}, "", False,
    ),
    "half of the columns": (
        {"pick": lambda x, perm, k, own, w:
         torch.gather(x, 0, (perm // k)[:, None].expand(-1, zoo.D // 2))}, "", False,
    ),
}  # fmt: skip
#: With gradients: rows that are masked, read in another way, or of no token.
TRAINED = ("largest", "bias in another order", "rows masked", "more rows than tokens")


def inputs(name):
    dtype = OTHERS[name][0].get("dtype", torch.float64)
    tokens = zoo.D // 2 if name in ("across", "half of the columns") else 8
    x, ids, w = zoo.given(tokens, dtype=dtype)
    if name == "bias behind a mask":
        ids[::3, 1] = zoo.E
    if name == "more rows than tokens":
        x = torch.cat([x.detach()] * 2).requires_grad_()
    return (x, ids, w) if name in TRAINED else (x.detach(), ids, w.detach())


class Blocks(torch.nn.ModuleList):
    """In one graph, each of inputs of its own."""

    def forward(self, given):
        return [block(*each) for block, each in zip(self, given, strict=True)]


@pytest.mark.parametrize(("names", "run"), [
    (TRAINED, check_gradients), ([name for name in OTHERS if name not in TRAINED], check),
])  # fmt: skip
def test_what_is_no_mixture(names, run):
    blocks = Blocks(Written(**OTHERS[name][0]) for name in names)
    harness = run(blocks, [inputs(name) for name in names])
    assert not harness.counts["experts"]
    assert zoo.count(harness, ROUTE) == sum(OTHERS[name][2] for name in names)
    refused = [OTHERS[name][1] for name in names]
    found = [why.code for why in harness.report.refusals]
    assert all(found.count(code) >= refused.count(code) for code in (SUM, MUTATION))


def test_as_written():
    assert check_gradients(Written(), *zoo.given()).counts["experts"] == 1


#: Another order, or counts of something else.
UNROUTED = (
    {"sort": lambda ids: torch.argsort(ids).flip(0)},
    {"sort": lambda ids: torch.argsort(ids) + 0},
    {"sort": lambda ids: torch.argsort(ids, descending=True)},
    {"count": lambda ids, _: zoo.histogram_of_all(ids * 0, None)},
    # Two at a time.
    {"count": lambda ids, _: torch.histc(ids.float(), bins=zoo.E, min=0, max=2 * zoo.E)},
    {"count": lambda ids, _: torch.histc(ids.float(), bins=zoo.E, min=1, max=zoo.E)},
)


def test_another_order_and_other_counts_stay():
    blocks = Blocks(zoo.Block(**how) for how in UNROUTED)
    harness = check(blocks, [zoo.given() for _ in UNROUTED])
    assert zoo.count(harness, ROUTE) == 0


def test_a_mask_that_somebody_sees_stays():
    """What is zero for pairs of no expert stays so where it is read."""

    class Seen(zoo.Block):
        def forward(self, x, ids, w):
            k, (own, perm) = ids.shape[1], torch.sort(ids.reshape(-1), stable=True)
            offs = torch.cumsum(zoo.histogram_of_all(ids.reshape(-1), perm), 0, dtype=torch.int32)
            mask = (own >= zoo.E)[:, None]
            z = self.mm(x[perm // k], self.w13.transpose(1, 2), offs).masked_fill(mask, 0.0)
            gate, up = z.chunk(2, -1)
            y = self.mm(gate.sigmoid() * up, self.w2.mT, offs).masked_fill(mask, 0.0)
            return zoo.viewed(y, w, perm, x, k), z.exp()

    x, ids, w = zoo.given(9)
    ids[::3, 1] = zoo.E
    harness = check_gradients(Seen(), x, ids, w)
    assert harness.counts["experts"] == 1
    assert sum(node.target == "masked_fill" for node in harness.raised.nodes) == 1


def test_rows_that_lie_in_order():
    """As behind an exchange with other ranks."""
    counts, block = torch.tensor([3, 0, 4, 1, 0]), zoo.Block()

    def function(rows, w1, w3, w2, counts):
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        return zoo.plain(zoo.two_weights(rows, offs, zoo.plain, None, w1, w3), w2.mT, offs)

    weights = block.w1, block.w3, block.w2
    harness = check_gradients(function, randn(8, zoo.D).requires_grad_(), *weights, counts)
    assert zoo.fused(harness) == ["pair", "", "", ""]
    assert zoo.count(harness, ROUTE) == zoo.count(harness, COMBINE) == 0
    assert zoo.count(harness, WGRAD) == 3
    assert sum(site.program.loads != () for site in harness.fused) == 1  # the gate's gradient


def test_ends_that_change_between_products_stay():
    """Of rows that lie in order: the second product reads other ends."""

    def function(x, w, sizes):
        offs = torch.cumsum(sizes, 0, dtype=torch.int32)
        y = zoo.plain(x, w, offs)
        offs[0] = 5
        return y + zoo.plain(x, w, offs)

    check(
        function, randn(9, zoo.D), randn(2, zoo.D, zoo.D), torch.tensor([3, 6], dtype=torch.int32)
    )


A, B = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in ((2, 0, 3), (1, 3, 1)))
X, LEFT, RIGHT = randn(5, 16), randn(3, 16, 24), randn(3, 16, 24)


def test_products_by_two_groupings_share_no_tile():
    def function(x, left, right, a, b):
        return grouped_mm(x, left, a, None) * grouped_mm(x, right, b, None)

    harness = check(function, X, LEFT, RIGHT, A, B)
    assert not any(site.program.paired for site in harness.fused)


def test_what_no_tile_of_experts_has():
    """A value of a column, and a sum over rows."""

    def function(x, left, right, a, vector):
        return (
            grouped_mm(x, left, a, None).sin() * vector,
            grouped_mm(x, right, a, None).sin().sum(0),
        )

    harness = check(function, X, LEFT, RIGHT, A, randn(24))
    assert "cannot share a vector of columns" in str([site.stops for site in harness.fused])
    assert not any(site.program.reduces for site in harness.fused)


def stopped_weights(y, w, perm, x, k):
    return zoo.weighted_last(y, w.detach(), perm, x, k) * w.sum()


def stopped_rows(y, w, perm, x, k):
    y = y[torch.argsort(perm)].view(-1, k, x.shape[1]).detach()
    return (y * w.unsqueeze(-1)).sum(1) + x


def test_a_gradient_that_was_stopped_stays_stopped():
    """``detach`` is no other name of weights, nor of rows: nothing flows through it."""
    blocks = Blocks(zoo.Block(sum=each) for each in (stopped_weights, stopped_rows))
    check_gradients(blocks, [zoo.given(9) for _ in blocks])
