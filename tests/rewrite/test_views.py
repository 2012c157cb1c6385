# SPDX-License-Identifier: Apache-2.0
"""A view of a node that took another's place shares that node's memory, in what is recorded too."""

from __future__ import annotations

import torch
from passes import aten_graph, run_pass

from coda_inductor.compat import storage
from coda_inductor.rewrite.views import refresh_views

aten = torch.ops.aten


def test_views_of_what_was_replaced_are_views_of_the_new_node():
    graph = aten_graph(lambda x: (x.cos(), x.sin().view(12)), torch.ones(4, 3))
    (sine,), (cosine,), (view,) = (
        graph.find_nodes(op="call_function", target=target.default)
        for target in (aten.sin, aten.cos, aten.view)
    )
    view.replace_input_with(sine, cosine)
    assert storage(view.meta["val"]) == storage(sine.meta["val"])
    run_pass(refresh_views, graph)
    assert storage(view.meta["val"]) == storage(cosine.meta["val"])
    assert view.meta["val"].shape == (12,)
