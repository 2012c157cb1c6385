# SPDX-License-Identifier: Apache-2.0
"""What is another name of what, and who reads it under which name."""

from __future__ import annotations

import functools

import pytest
import torch
from harness import Harness
from passes import aten_graph
from torch import nn

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import bias_of, is_sum, plain_bias, terms
from coda_inductor.graph.nodes import bare, base, fake, is_transpose, readers, source

aten = torch.ops.aten


def names(x):
    """A view of a rounded copy of a view of a widened copy, which a sum and a product read."""
    view = x.float().view(2, 6).bfloat16().view(12)
    return view + 1, view * 2


@pytest.fixture
def graph():
    return aten_graph(names, torch.randn(3, 4, dtype=torch.bfloat16))


def test_base_stops_at_a_cast_and_bare_at_what_computes(graph):
    (x,) = graph.find_nodes(op="placeholder")
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    view = add.args[0]
    assert base(view) is view.args[0]
    assert fake(base(view)).dtype == torch.bfloat16
    assert bare(view) is x
    assert base(add) is bare(add) is add
    assert base(2.0) == 2.0


def test_source_looks_through_what_widens_only(graph):
    (x,) = graph.find_nodes(op="placeholder")
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    rounded = base(add.args[0])
    assert source(add.args[0]) is rounded
    assert source(rounded.args[0]) is x


def test_readers_under_all_names(graph):
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    (mul,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    view = add.args[0]
    assert readers(base(view)) == ([base(view), view], [add, mul])


def test_what_a_bias_is():
    def function(x, w, row, whole):
        return torch.addmm(row, x, w), torch.addmm(whole, x, w), torch.addmm(row, x, w, alpha=2)

    graph = aten_graph(function, *(torch.randn(s) for s in ((3, 4), (4, 5), (5,), (3, 5))))
    gemms = graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert [plain_bias(gemm) for gemm in gemms] == [True, False, False]
    assert all(bias_of(gemm) is gemm.args[0] for gemm in gemms)


def test_a_sum_that_broadcasts_is_none():
    def function(x, w, v):
        return (x @ w) + (x @ v), (x @ w) + (x[:1] @ v)

    graph = aten_graph(function, torch.randn(3, 4), torch.randn(4, 5), torch.randn(4, 5))
    good, bad = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert (is_sum(good), is_sum(bad)) == (True, False)
    assert len(terms(good)) == 2
    assert terms(bad) is None


def test_put_records_values_and_prune_takes_them_out():
    graph = aten_graph(lambda x: x.t(), torch.randn(3, 4))
    (x,) = graph.find_nodes(op="placeholder")
    put = Put(graph, like=x, pattern=("name", "here"))
    with graph.inserting_before(graph.output_node()):
        node = put.row_sum(put.mul(put.cast(x, torch.float64), 2.0))
        turned = put.transpose(put.reshape(put.column_sum(x), [2, 2]))
    assert (fake(node).shape, fake(node).dtype) == ((3, 1), torch.float64)
    assert is_transpose(turned)
    assert fake(turned).shape == (2, 2)
    assert node.meta["coda_pattern"] == ("name", "here")
    before = len(graph.nodes)
    prune([node, turned])
    assert len(graph.nodes) == before - 6


class Behind(nn.Module):
    """As adapters do it: attributes of the model inside are its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        return self.inner(x)


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Behind):
    """As transformers 5.24 decorates what returns a cache."""

    forward = decorated(Behind.forward)


MODELS = {"main": nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))}
LIST = [MODELS["main"]]


def of_a_dict(x):
    return MODELS["main"](x)


def of_a_list(x):
    return LIST[0](x)


def functional(x):
    return torch.func.functional_call(LIST[0], dict(LIST[0].named_parameters()), (x,))


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (Behind(), "inner.0"),
        (Decorated(), "inner.0"),
        (of_a_dict, "main.0.0"),
        (of_a_list, "0.0.0"),
        (functional, "0.0.0"),
    ],
    ids=["behind a getattr", "behind a decorator", "of a dict", "of a list", "functional"],
)
def test_module_paths(function, path):
    harness = Harness()
    harness.run(function, torch.ones(3, 8))
    assert [site.site for site in harness.report.sites] == [path]
