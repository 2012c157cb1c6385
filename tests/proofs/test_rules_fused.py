# SPDX-License-Identifier: Apache-2.0
"""R2, R6, R7 and R8 about ``fuse``, ``rewrite/loss`` and ``rewrite/heads``:
fused sites run as kernels run them, in tiles of two by two and on interleaved pairs of weights, and
give the numbers of the graph they are from.
"""

import pytest
import rationals
import torch
from checking import slice_logits, swiglu
from rationals import Kernels, after, joint, results
from test_rules import SUBJECTS, by, defer, everywhere, subject

from coda_inductor.fuse import emit
from coda_inductor.graph.nodes import fake
from coda_inductor.lowering.driver import fuse_gemms
from coda_inductor.patterns.equal import difference
from coda_inductor.program import EpilogueProgram
from coda_inductor.rewrite.decompose import decompose_most
from coda_inductor.rewrite.heads import rotate_rows
from coda_inductor.rewrite.loss.slices import slice_loss_gradient
from coda_inductor.rewrite.loss.unstored import compare_targets
from coda_inductor.runtime import linear_cross_entropy
from coda_inductor.semantic import cross_entropy
from coda_inductor.semantic.loss import entropy
from coda_inductor.semantic.rotary import rotate


def fuse(graph):
    by(decompose_most)(graph)
    by(fuse_gemms)(graph)


def programs(graph):
    calls = [n for n in graph.nodes if n.target is torch.ops.coda_inductor.gemm_epilogue.default]
    return [EpilogueProgram.from_json(call.args[3]) for call in calls]


@pytest.mark.parametrize("name", SUBJECTS)
def test_partials_of_tiles_make_the_statistics(name):
    """R2: with every GEMM fused, rows in three tiles and columns in two or three."""
    graph, want = subject(name)
    rewritten = after(graph, defer, fuse)
    reduced = [r for p in programs(rewritten) for r in p.reduces]
    assert {r.axis for r in reduced} >= {"row"}
    assert everywhere(rewritten) == want


def test_columns_that_alternate_are_the_two_products(monkeypatch):
    """R6: gate and up from one product by a weight whose columns alternate."""
    graph = joint(
        lambda x, wg, wu, c: swiglu(torch.addmm(c, x, wg), x @ wu), (3, 4), (4, 5), (4, 5), (5,)
    )
    rewritten = after(graph, fuse)
    assert any(p.paired for p in programs(rewritten))
    want = results(graph)
    assert results(rewritten) == want
    plain = rationals.paired
    monkeypatch.setattr(rationals, "paired", lambda cls, a, b0, b1: plain(cls, a, b1, b0))
    assert results(rewritten) != want


slice_loss = by(slice_loss_gradient)


def rotated(x, w, row, col, cos, sin):
    """One value a row scales the product, one a column is added, then heads of two are turned."""
    q = (torch.addmm(row, x, w) * col).view(2, 3, 2, 2).permute(0, 2, 1, 3)
    return rotate(q, cos, sin, 1, False, False, False, q.dtype)


@pytest.mark.parametrize("rows", [1, 2], ids=["shared", "own"])
def test_an_exchange_of_columns_goes_through_the_epilogue(rows, monkeypatch):
    """R8: queries leave their projection rotated, by tables of one row a row."""
    shapes = (6, 4), (4, 4), (4,), (6, 1), (rows, 1, 3, 2), (rows, 1, 3, 2)
    graph = joint(rotated, *shapes)
    want = results(graph)
    assert results(after(graph, by(rotate_rows))) == want
    fused = after(graph, by(rotate_rows), fuse)
    assert [p.head for p in programs(fused)] == [2]
    assert results(fused) == want
    monkeypatch.setattr(emit, "swap", lambda row, *_: row.clone())  # the bias of its own column
    assert results(after(graph, by(rotate_rows), fuse)) != want


V = 3
TARGET = torch.tensor([2, -100])


def head(*, smoothing=0.0, cap=0.0, penalty=False, spread=False):
    """An LM head and its loss; with a z-loss or entropies, rows of which count ``scale``."""

    def loss(h, w, b, scale, target):
        z = torch.addmm(b, h, w.t())
        logits = cap * torch.tanh(z / cap) if cap else z
        found = cross_entropy(logits, target, -100, smoothing, "mean", logits.dtype)[0]
        found = found + (scale * torch.logsumexp(logits, -1)).sum() if penalty else found
        return found + (scale * entropy(logits, logits.dtype)[0]).sum() if spread else found

    return loss


HEADS = {
    "smoothing": {"smoothing": 0.25},
    "cap": {"cap": 2.0},
    "penalty": {"penalty": True},
    "entropy": {"spread": True},
}


@pytest.fixture
def small_slices(monkeypatch):
    """Slices of the vocabulary are two columns wide."""
    slice_logits(monkeypatch, 1)
    monkeypatch.setattr(linear_cross_entropy, "_ALIGN", 2)


def head_graph(name, *, graded=True):
    graph = joint(head(**HEADS[name]), (2, 1), (V, 1), (V,), (2,), TARGET, graded=graded)
    inputs = graph.find_nodes(op="placeholder")
    (target,) = (n.target for n in inputs if fake(n).dtype == torch.int64)
    return graph, {target: TARGET}


def differ(have, want):
    """Some element of the two is not the same real number, for symbols in place of all inputs."""
    pairs = [
        pair
        for left, right in zip(have, want, strict=True)
        for pair in zip(left, right, strict=True)
    ]
    return next((d for left, right in pairs if (d := difference(left, right))), None)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("name", HEADS)
def test_gradient_of_logits_by_slices(name, monkeypatch):
    """R7, backward: columns of the gradient are made and used two at a time."""
    graph, given = head_graph(name)
    rewritten = after(graph, slice_loss)
    calls = [n for n in rewritten.nodes if "linear_cross_entropy" in str(n.target)]
    assert len(calls) == 1
    want = results(graph, Kernels, **given)
    assert differ(results(rewritten, Kernels, **given), want) is None
    right = linear_cross_entropy.row_weights
    monkeypatch.setattr(linear_cross_entropy, "row_weights", lambda *a: 2 * right(*a))
    assert "results differ" in differ(results(rewritten, Kernels, **given), want)


def test_a_target_is_found_by_comparison():
    """R7, without gradients: the sum of what is at the target's column is the target's logit."""
    graph, given = head_graph("smoothing", graded=False)
    rewritten = after(graph, by(compare_targets), fuse)
    assert [p.stores for p in programs(rewritten)] == [()]
    want = results(graph, Kernels, **given)
    assert differ(results(rewritten, Kernels, **given), want) is None


@pytest.mark.parametrize(("name", "combine"), [("smoothing", "logsumexp"), ("entropy", "entropy")])
def test_statistics_of_tiles(name, combine):
    """R7, forward: each row's log-sum-exp is that of two tiles' log-sum-exps, and its entropy that
    of the choice of a tile and the mean of the tiles' own."""
    graph, given = head_graph(name)
    rewritten = after(graph, fuse)
    assert combine in [r.combine for p in programs(rewritten) for r in p.reduces]
    have, want = (results(each, Kernels, **given) for each in (rewritten, graph))
    forward = slice(1) if combine == "entropy" else slice(None)  # the rest takes 20 seconds
    assert differ(have[forward], want[forward]) is None
