# SPDX-License-Identifier: Apache-2.0
"""Full slices, clones and what is transposed twice go before our rewrites look for idioms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check_gradients, randn
from passes import aten_graph, run_pass
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor import pipeline

(NOOPS,) = (each.run for each in pipeline.ON_ATEN if each.name == "noops")


def test_what_changes_nothing_goes_and_the_rest_stays():
    aten = torch.ops.aten
    graph = aten_graph(lambda x: x.sin()[:9, 0:].contiguous()[1:].clone().cos(), torch.empty(9, 4))
    run_pass(NOOPS, graph)
    left = [n.target for n in graph.nodes if n.op == "call_function"]
    assert left[0] is aten.sin.default
    assert left[-1] is aten.cos.default
    assert left.count(aten.slice.Tensor) == 1  # [1:]


def test_a_pass_of_torchs_that_fails_costs_no_compilation(monkeypatch):
    from coda_inductor.rewrite import noops

    def fails(graph):
        raise AttributeError("renamed")

    graph = aten_graph(lambda x: x.sin(), torch.empty(4))
    monkeypatch.setattr(noops, "remove_noop_ops", fails)
    run_pass(NOOPS, graph)
    assert [n.op for n in graph.nodes] == ["placeholder", "call_function", "output"]


def test_sizes_are_asked_of_inputs():
    """A norm whose result is asked for its size would have another reader than projections."""
    graph = make_fx(lambda x: x.cos().exp(), tracing_mode="symbolic")(torch.ones(3, 4)).graph
    (cos,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    with graph.inserting_after(cos):
        asked = graph.call_function(torch.ops.aten.sym_size.int, (cos, 0))
    asked.meta["val"] = cos.meta["val"].shape[0]
    run_pass(NOOPS, graph)
    assert asked.args == (next(iter(graph.nodes)), 0)


def test_the_forward_pass_asks_no_tangent_for_its_sizes():
    """Of all inputs only the gradient of the output has as many rows as ``both``."""

    def function(x, y, weight):
        both = torch.cat([x, y])
        return F.linear(both, weight).sum((1, 2))

    inputs = [randn(4, 3, 8).requires_grad_() for _ in range(2)]
    check_gradients(function, *inputs, randn(8, 8), dynamic=True)


def permute(x, dims=(1, 0)):
    return torch.ops.aten.permute.default(x, list(dims))


def also_once(a, b):
    once = permute(a @ b)
    return permute(once).float(), once


TRANSPOSED = {
    "twice": (lambda a, b: (permute(permute(a @ b)).float(),), 0),
    "read between": (also_once, 1),
    "once": (lambda a, b: (permute(permute(a.sin() @ b), [0, 1]) * 2,), 2),
    "no product": (lambda a, b: (permute(permute((a @ b).sin())) * 2,), 2),
    "three dimensions": (lambda a, b: (permute((a @ b).unsqueeze(0), [1, 2, 0]) * 2,), 1),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_product_that_is_transposed_twice_is_read_as_it_is(name):
    function, left = TRANSPOSED[name]
    a, b = randn(6, 4).double(), randn(4, 5).double()
    graph = aten_graph(function, a, b)
    run_pass(NOOPS, graph)
    permutes = graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)
    assert len(permutes) == left
    have, want = torch.fx.GraphModule({}, graph)(a, b), function(a, b)
    for ours, theirs in zip(have, want, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
