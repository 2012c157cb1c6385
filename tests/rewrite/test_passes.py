# SPDX-License-Identifier: Apache-2.0
"""What all passes of rewrite/ owe: they leave alone what is not theirs, run twice without harm, and
name what the user has disabled."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from harness import Harness
from passes import aten_graph, run_pass

from coda_inductor import FallbackError
from coda_inductor.rewrite.borders import save_borders
from coda_inductor.rewrite.collectives import merge_collectives
from coda_inductor.rewrite.embedding import gather_lookup_gradients
from coda_inductor.rewrite.loss.slices import slice_loss_gradient
from coda_inductor.rewrite.norm.defer import defer_norms
from coda_inductor.rewrite.recompute import recompute_in_backward
from coda_inductor.rewrite.tables import keep_tables
from coda_inductor.rewrite.views import refresh_views
from coda_inductor.semantic.norms import layer_norm, rms_norm

PASSES = (
    defer_norms, slice_loss_gradient, gather_lookup_gradients, recompute_in_backward, keep_tables,
    refresh_views, save_borders, merge_collectives,
)  # fmt: skip


def targets(graph):
    return [node.target for node in graph.nodes]


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
def test_a_graph_without_anything_for_it_stays(run):
    graph = aten_graph(lambda x, w: (x @ w).relu().sum(), torch.randn(3, 4), torch.randn(4, 5))
    before = targets(graph)
    record = run_pass(run, graph)
    assert targets(graph) == before
    assert not record.fired
    assert not record.report.refusals


def norm(x, w, gamma, v):
    return rms_norm(x @ w, gamma, 1e-5, torch.float64)[0] @ v


def norm_arguments():
    return [torch.randn(s, dtype=torch.float64) for s in ((3, 4), (4, 6), (6,), (6, 5))]


def test_a_bug_in_the_analysis_is_a_failure_of_that_norm_alone(monkeypatch):
    def broken(*_):
        raise IndexError("a bug of ours")

    graph = aten_graph(norm, *norm_arguments())
    before = targets(graph)
    monkeypatch.setattr("coda_inductor.rewrite.norm.defer.uses", broken)
    (why,) = run_pass(defer_norms, graph).report.refusals
    assert (why.code, why.failure) == ("defect", True)
    assert "a bug of ours" in why.text
    assert targets(graph) == before
    with pytest.raises(Exception, match="a bug of ours") as caught:  # where it is strict
        Harness().run(
            lambda *args: F.linear(F.rms_norm(args[0] @ args[1], (6,)), args[2]),
            *(torch.randn(s) for s in ((3, 4), (4, 6), (5, 6))),
        )
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), FallbackError)


def stream(x, y, w, gamma, beta):
    """Three LayerNorms of one residual stream; no GEMM makes the first one's input."""
    for _ in range(3):
        n = layer_norm(x, gamma, beta, 1e-5, torch.float64)[0]
        y = y + n @ w
        x = x + y.cumsum(0) @ w
    return x, y


def test_the_mean_of_a_deferred_layer_norm_is_the_pivot_of_the_next():
    """The nearest one: what was added since is rounded with the operand."""
    sizes = ((3, 4), (3, 4), (4, 4), (4,), (4,))
    graph = aten_graph(stream, *(torch.randn(s, dtype=torch.float64) for s in sizes))
    (why,) = run_pass(defer_norms, graph).report.refusals
    assert why.code == "norm-input-no-gemm"
    subs = graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor)
    first, second = [n.args[1] for n in subs if n.args[1].meta["val"].shape == (3, 1)][::2]
    assert first.target is operator.getitem  # of the norm that stays
    assert second.target is torch.ops.aten.add.Tensor
    assert first in second.all_input_nodes
