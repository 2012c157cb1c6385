# SPDX-License-Identifier: Apache-2.0
"""What a function does is traced once a graph for the same tensors, and copied."""

import pytest
import torch
from harness import Harness
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.compat import select_decomp_table, storage
from coda_inductor.graph import splice as module
from coda_inductor.graph.splice import splice
from coda_inductor.graph.vocabulary import LOWERINGS


def function(x, y, scale):
    z = (x.t().float() * scale).relu()
    return z.t() + y, z.amax(1, keepdim=True)


@pytest.fixture
def traces(monkeypatch):
    calls, trace = [], module._trace
    monkeypatch.setattr(module, "_trace", lambda *args: calls.append(args) or trace(*args))
    return calls


def graph_of(*values, mode=None):
    graph = Graph()
    with mode or FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        nodes = [graph.placeholder(f"x{i}") for i in range(len(values))]
        for node, value in zip(nodes, values, strict=True):
            node.meta["val"] = fakes.from_tensor(value)
    return graph, nodes, graph.output(tuple(nodes))


def put(graph, nodes, output, *more):
    return splice(output, function, (*nodes, *more), like=nodes[0])


X, Y = torch.randn(6, 4), torch.randn(6, 4)


def test_a_copy_is_what_tracing_gives_and_shares_memory_as_traced(traces):
    graph, (x, y), output = graph_of(X, Y)
    first, again = (put(graph, (x, y), output, 2.0) for _ in range(2))
    made = list(graph.nodes)[2:-1]
    other = put(graph, (x, y), output, 3.0)
    assert len(traces) == 2
    one, two = made[: len(made) // 2], made[len(made) // 2 :]
    seen = {storage(node.meta["val"]) for node in one}
    for a, b in zip((n.meta["val"] for n in one), (n.meta["val"] for n in two), strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        assert b.fake_mode is a.fake_mode
        assert (storage(b) in seen) == (storage(a) == storage(x.meta["val"]))
    output.args = ((first, again, other),)
    graph.lint()
    for have, scale in zip(torch.fx.GraphModule({}, graph)(X, Y), (2.0, 2.0, 3.0), strict=True):
        assert all(map(torch.equal, have, function(X, Y, scale)))


@pytest.mark.parametrize("other", [
    X.bfloat16(), X.t().contiguous().t(), torch.randn(6, 8)[:, :4], torch.randn(25)[1:].view(6, 4),
], ids=["dtype", "strides", "width", "offset"])  # fmt: skip
def test_other_tensors_are_traced_anew(traces, other):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for value in (X, other):
        put(*graph_of(value, Y, mode=mode), 2.0)
    assert len(traces) == 2


def test_one_memory_twice_and_symbolic_sizes_are_traced_each_time(traces):
    _, (x, _), output = graph_of(X, Y)
    for _ in range(2):
        splice(output, function, (x, x, 2.0), like=x)
    assert len(traces) == 2

    symbolic = make_fx(lambda x, y: x + y, tracing_mode="symbolic")(X, Y).graph
    nodes = symbolic.find_nodes(op="placeholder")
    with nodes[0].meta["val"].fake_mode:
        for _ in range(2):
            splice(symbolic.output_node(), function, (*nodes, 2.0), like=nodes[0])
    assert len(traces) == 4


def test_equal_layers_without_kernels_are_expanded_from_one_trace(traces):
    def layers(x, *weights):
        for w in weights:
            x = torch.nn.functional.gelu(x @ w)
        return x

    counts = []
    for n in (3, 6):
        before = len(traces)
        Harness().run(layers, torch.randn(8, 16), *(torch.randn(16, 16) for _ in range(n)))
        counts.append(len(traces) - before)
    assert counts == [1, 1]


def test_a_result_that_is_returned_again_keeps_its_gradient():
    """A pass drops the detach, which only renames, so that the graph returns y twice."""

    def function(x, w):
        y = x @ w
        return y.detach(), y.mT

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    _, ours = Harness().train(function, x, w)
    have, want = (torch.autograd.grad(y.sin().sum(), (x, w)) for y in (ours, function(x, w)[1]))
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("name", ["silu", "gelu", "hardtanh", "clamp", "square", "rsub"])
def test_what_epilogues_need_no_step_for_is_decomposed(name):
    """Of ``vocabulary``: Inductor's decompositions resolve these in each graph that it traces."""
    numbers = {"rsub": (2.0,), "clamp": (-1.0, 1.0)}.get(name, ())
    trace = make_fx(
        lambda x: getattr(torch.ops.aten, name)(x, *numbers),
        decomposition_table=select_decomp_table(),
    )
    traced = trace(torch.randn(3))
    targets = {n.target for n in traced.graph.nodes if n.op == "call_function"}
    assert targets <= LOWERINGS.keys()
    assert name not in {target.overloadpacket.__name__ for target in targets}
