# SPDX-License-Identifier: Apache-2.0
"""Nodes that are put and pruned, and the modules that a report says GEMMs are of."""

from __future__ import annotations

import functools

import pytest
import torch
from harness import Harness
from passes import aten_graph
from torch import nn

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.nodes import fake, is_transpose

aten = torch.ops.aten


def test_put_records_values_and_prune_takes_them_out():
    graph = aten_graph(lambda x: x.t(), torch.randn(3, 4))
    (x,) = graph.find_nodes(op="placeholder")
    put = Put(x, graph.output_node(), pattern=("name", "here"))
    node = put.row_sum(put.mul(put.cast(x, torch.float64), 2.0))
    turned = put.transpose(put.reshape(put.column_sum(x), [2, 2]))
    assert (fake(node).shape, fake(node).dtype) == ((3, 1), torch.float64)
    assert is_transpose(turned)
    assert fake(turned).shape == (2, 2)
    assert node.meta["coda_pattern"] == ("name", "here")
    before = len(graph.nodes)
    prune([node, turned])
    assert len(graph.nodes) == before - 6


def test_a_reshape_that_copies_nothing_is_a_view():
    graph = aten_graph(lambda x: x, torch.randn(4, 6).t())
    (x,) = graph.find_nodes(op="placeholder")
    put = Put(x, graph.output_node())
    shapes = [2, 3, 4], [6, 2, 2], [24]
    targets = [put.reshape(x, shape).target for shape in shapes]
    assert targets == [aten.view.default] * 2 + [aten.reshape.default]


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
