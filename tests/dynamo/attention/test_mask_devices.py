# SPDX-License-Identifier: Apache-2.0
"""Constant masks that a model makes on a GPU, in each way to name one; evaluated without any."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from coda_inductor.dynamo.attention.constants import Constants

T = 6


def made(graph, **where):
    ones = graph.call_function(torch.ones, (T, T), {"dtype": torch.bool, **where})
    return graph.call_method("tril", (ones,))


WAYS = {
    "cuda()": lambda g: g.call_method("cuda", (made(g),)),
    "cuda(1)": lambda g: g.call_method("cuda", (made(g), 1), {"non_blocking": True}),
    "device=0": lambda g: made(g, device=0),
    "device='cuda:1'": lambda g: made(g, device="cuda:1"),
    "device=torch.device": lambda g: made(g, device=torch.device("cuda", 0)),
    "to('cuda')": lambda g: g.call_method("to", (made(g), "cuda")),
    "to(device=0)": lambda g: g.call_method("to", (made(g),), {"device": 0}),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_evaluated_on_the_cpu(way):
    graph = Graph()
    mask = WAYS[way](graph)
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(T, T, dtype=torch.bool)
    found = Constants(graph).value(mask)
    torch.testing.assert_close(found, torch.ones(T, T, dtype=torch.bool).tril())
