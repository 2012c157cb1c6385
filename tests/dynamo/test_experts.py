# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts are found however they are written, and fused in both directions; what is no
such block stays as it is, with a reason."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from zoo import experts as zoo

from coda_inductor.semantic.experts import COMBINE, ROUTE, WGRAD
from coda_inductor.semantic.experts import group_rows as GROUP_ROWS
from coda_inductor.semantic.experts import grouped_mm as GROUPED

#: Every way to sum, and each of the others at least once.
ALL = [
    {"sum": s, "sort": zoo.SORTS[i % 2], "count": zoo.COUNTS[i // 2 % 2],
     "gather": [*zoo.GATHERS][i % 3]} for i, s in enumerate(zoo.SUMS)
]  # fmt: skip


@pytest.mark.parametrize(
    "how", ALL, ids=lambda how: "-".join(getattr(v, "__name__", v) for v in how.values())
)
def test_every_spelling(how):
    """Algebra: gradients in float64 are eager's; the counters are one a block."""
    harness = check_gradients(zoo.Block(**how), *zoo.given())
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1
    assert zoo.fused(harness) == ["gathered pair", "", "gathered ", ""]
    assert [zoo.count(harness, op) for op in (ROUTE, COMBINE, WGRAD)] == [1, 2, 2]
    assert not [op for op in harness.ops() if "sort" in op or "cumsum" in op or "scatter_add" in op]


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (33, 3)])
def test_sizes(tokens, k):
    """And as many tokens that all go to one expert."""
    x, ids, w = zoo.given(tokens, k)
    harness = check_gradients(zoo.Block(), x, torch.full_like(ids, 3) if k == 3 else ids, w)
    assert harness.counts["experts"] == 1


def row_operands(harness):
    programs = [s.program for s in harness.fused if s.program.grouped]
    return [sum(o.kind == "row" for o in program.operands) for program in programs]


MASKED, BIAS, EACH = {"masked": True}, {"biased": True}, {"biased_up": True, "biased": True}
#: How a block is written, how its first product is multiplied, and how many rows of its group it
#: reads: a bias in front of the gate is of the tile that gates, no rows of it are written.
WRITTEN = [
    ({"up": zoo.interleaved}, "pair", 0), (MASKED | BIAS, "pair", 0),
    ({"sum": zoo.scattered} | BIAS, "pair", 0), (EACH | MASKED, "pair", 2),
    ({"up": zoo.two_weights} | EACH | MASKED, "pair", 1),
    ({"up": zoo.no_gate} | EACH | MASKED, "", 1),
]  # fmt: skip


@pytest.mark.parametrize(("how", "paired", "rows"), WRITTEN)
def test_gates_masks_and_biases(how, paired, rows):
    """Pairs of no expert add nothing, in either direction: what masks them goes. A token's sum of
    biases is added behind the sum of its rows."""
    x, ids, w = zoo.given(9)
    if "masked" in how:
        ids[::3, 1] = zoo.E
    harness = check_gradients(zoo.Block(**how), x, ids, w)
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1
    assert zoo.fused(harness) == [f"gathered {paired}", "", "gathered ", ""]
    assert row_operands(harness)[0] == rows
    assert zoo.count(harness, GROUP_ROWS) == 0


NOT_ALTERNATING = (
    lambda z: z[:, ::2] * z[:, 1::2].sum(),
    lambda z: z[:, ::2] * z[:, 1::2] + z[:, : zoo.H],
    lambda z: z[:, 1::2] * z[:, 1::2].cos(),
    lambda z: z[:, 0 : zoo.H : 2] * z[:, 1 : zoo.H : 2],
    lambda z: z[:, : zoo.H] * z[:, 1 : zoo.H + 1],
    lambda z: (z[::2] * z[1::2]).repeat(2, 1)[:, : zoo.H],
    lambda z: (z[:, ::2].sin(), z[:, 1::2].cos()),
)


def test_what_alternates_not():
    offsets = torch.tensor([0, 2, 2, 6], dtype=torch.int32)

    def function(x, *weights):
        products = (GROUPED(x, w, offsets, None) for w in weights)
        return [each(z) for each, z in zip(NOT_ALTERNATING, products, strict=True)]

    harness = check(
        function, randn(6, zoo.D), *(randn(3, zoo.D, 2 * zoo.H) for _ in NOT_ALTERNATING)
    )
    assert len(harness.report.sites) == len(NOT_ALTERNATING)
    assert not any(site.program.alternating for site in harness.fused)


@pytest.mark.parametrize("where", ["other ids", "twice", "changed later"])
def test_what_is_no_bias_in_front_of_the_gate(where):
    class Other(zoo.Block):
        def forward(self, x, ids, w):
            k, flat = ids.shape[1], ids.reshape(-1)
            perm = torch.argsort(flat)
            offs = torch.cumsum(zoo.histogram_of_all(flat, perm), 0, dtype=torch.int32)
            z = self.mm(x[perm // k], self.w13.mT, offs)
            total = z + self.bias_of(self.w13.mT)[flat if where == "other ids" else flat[perm]]
            if where == "changed later":
                total[1:].mul_(2)
            if where == "twice":
                total = total * z
            gate, up = total.chunk(2, -1)
            return zoo.viewed(self.mm(F.silu(gate) * up, self.w2.mT, offs), w, perm, x, k)

    harness = check_gradients(Other(biased_up=True), *zoo.given())
    assert harness.counts["experts"] == 1
    assert row_operands(harness)[0] == 0


def test_only_what_is_wanted():
    """In inference; of frozen weights; of nothing but weights."""
    harness = check(zoo.Block(), *zoo.given())
    assert zoo.fused(harness) == ["gathered pair", ""]
    harness = check_gradients(zoo.Block().requires_grad_(False), *zoo.given())
    assert (zoo.count(harness, WGRAD), harness.counts["experts_backward"]) == (0, 1)
    x, ids, w = zoo.given()
    harness = check_gradients(zoo.Block(), x.detach(), ids, w.detach())
    assert [zoo.count(harness, op) for op in (COMBINE, WGRAD)] == [1, 2]


def test_what_is_not_fused_multiplies_as_it_was_written():
    """One product a weight, forward and backward, and a cat of the gradients. Without epilogues a
    bias in front of the gate has no tile: its rows are those that the user took."""
    harness = check_gradients(zoo.Block(biased_up=True), *zoo.given(), gate="never")
    products = [op for op in harness.ops().elements() if "grouped_plain" in op]
    assert len(products) == 4
    assert (harness.counts["experts"], harness.counts["experts_backward"]) == (1, 0)
    assert zoo.count(harness, GROUP_ROWS) == 0
