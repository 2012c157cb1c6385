# SPDX-License-Identifier: Apache-2.0
"""0-dim constants on a tile have the value that their dtype gives them, as in torch; masks that a
model makes on a GPU are evaluated without any."""

from __future__ import annotations

import math

import pytest
import torch
from checking import check, randn
from torch.fx import Graph, GraphModule

from coda_inductor.dynamo.attention.constants import Constants
from coda_inductor.matching import Body

FULL = [
    (3.7, torch.int64), (-3.7, torch.int32), (-1, torch.uint8), (2.5, torch.bool), (0, torch.bool),
    (0.1, torch.bfloat16), (0.1, torch.float16), (1e6, torch.float16), (0.1, torch.float32),
    (0.1, torch.float64), (math.inf, torch.float32), (True, torch.float32),
]  # fmt: skip


def test_constants_have_their_dtype():
    """Each a factor of another product."""

    def function(x, ws):
        found = [
            (x @ w) * torch.full((), n, dtype=d) for (n, d), w in zip(FULL, ws[1:], strict=True)
        ]
        return found, (x @ ws[0]) * torch.scalar_tensor(*FULL[0][:1], dtype=FULL[0][1])

    harness = check(function, randn(6, 8), [randn(8, 10) for _ in range(len(FULL) + 1)])
    assert len(harness.fused) == len(FULL) + 1


def test_a_number_that_is_complex_is_no_constant():
    def function(x, w):
        return (x @ w) * torch.full((), 2.0, dtype=torch.complex128)

    assert not check(function, randn(6, 8), randn(8, 10)).fused


T = 6


def made(graph, **where):
    ones = graph.call_function(torch.ones, (T, T), {"dtype": torch.bool, **where})
    return graph.call_method("tril", (ones,))


WAYS = {
    "cuda()": lambda g: g.call_method("cuda", (made(g),)),
    "cuda(1)": lambda g: g.call_method("cuda", (made(g), 1), {"non_blocking": True}),
    "device=0": lambda g: made(g, device=0),
    "device=torch.device": lambda g: made(g, device=torch.device("cuda", 0)),
    "to('cuda')": lambda g: g.call_method("to", (made(g), "cuda")),
    "to(device=0)": lambda g: g.call_method("to", (made(g),), {"device": 0}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_is_evaluated_on_the_cpu(way):
    graph = Graph()
    mask = WAYS[way](graph)
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(T, T, dtype=torch.bool)
    found = Constants(Body(GraphModule({}, graph))).value(mask)
    torch.testing.assert_close(found, torch.ones(T, T, dtype=torch.bool).tril())
