# SPDX-License-Identifier: Apache-2.0
"""Semantic ops become the aten ops that define them."""

from __future__ import annotations

import torch
from checking import swiglu
from passes import aten_graph, run_pass

from coda_inductor.rewrite.decompose import decompose, decompose_most
from coda_inductor.semantic.define import DEFINITIONS
from coda_inductor.semantic.loss import row_logsumexp


def semantic(graph: torch.fx.Graph) -> list[object]:
    return [n.target for n in graph.nodes if n.target in DEFINITIONS]


def test_the_definition_takes_the_place_of_the_op():
    x = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    graph = aten_graph(lambda gate, up: swiglu(gate, up).sin(), *x)
    assert semantic(graph) == [swiglu]
    run_pass(decompose, graph)
    assert semantic(graph) == []
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    torch.testing.assert_close(module(*x), (torch.nn.functional.silu(x[0]) * x[1]).sin())
    patterns = {n.meta["coda_pattern"][0] for n in graph.nodes if "coda_pattern" in n.meta}
    assert patterns == {"swiglu"}  # what a fused GEMM is then said to absorb


def test_reductions_that_an_epilogue_may_take_wait_for_it():
    x = torch.randn(3, 8)
    graph = aten_graph(lambda x: row_logsumexp(swiglu(x, x)), x)
    run_pass(decompose_most, graph)
    assert semantic(graph) == [row_logsumexp]
