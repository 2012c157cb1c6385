# SPDX-License-Identifier: Apache-2.0
"""Reshapes become views where no copy is needed, and only there."""

from __future__ import annotations

import torch
from passes import aten_graph, run_pass

from coda_inductor import pipeline

(VIEWS,) = (each.run for each in pipeline.ON_ATEN if each.name == "views")
aten = torch.ops.aten


def reshaped(x: torch.Tensor, shape: list[int]) -> object:
    """What the pass makes of a reshape of `x`."""
    graph = aten_graph(lambda x: x.sin(), x)
    (sine,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    with graph.inserting_after(sine):
        node = graph.call_function(aten.reshape.default, (sine, shape))
    node.meta["val"] = sine.meta["val"].reshape(shape)
    graph.output_node().args = (node,)
    run_pass(VIEWS, graph)
    return node.target


def test_rows_one_after_the_other_are_viewed():
    assert reshaped(torch.empty(4, 6), [2, 12]) is aten.view.default


def test_a_transposed_tensor_is_viewed_where_strides_allow_it():
    assert reshaped(torch.empty(4, 6).t(), [6, 2, 2]) is aten.view.default
    assert reshaped(torch.empty(4, 6).t(), [24]) is aten.reshape.default  # a copy
