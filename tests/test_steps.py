# SPDX-License-Identifier: Apache-2.0
"""What our passes do grows with the graph as n log n: lines that they execute, against nodes."""

import math
import os
import sys
from functools import partial
from unittest import mock

import pytest
import torch
from harness import Harness
from torch import nn
from torch.fx import Graph
from zoo.layers import Gated

import coda_inductor
from coda_inductor import tracing
from coda_inductor.pipeline import on_dynamo

PACKAGE = os.path.dirname(coda_inductor.__file__)
FX = os.path.dirname(torch.fx.__file__)
D = 16


def stack(n: int):
    """A plain Transformer without attention."""
    return nn.Sequential(*(Gated(D, D, front=True) for _ in range(n)))


def chain(n: int):
    w = torch.randn(D, D, requires_grad=True)

    def function(x):
        y = x @ w
        for i in range(n):
            y = y * 1.0001 + 0.5 if i % 3 else torch.tanh(y)
        return y @ w

    return function


class Counted(Harness):
    """Counts the lines that our passes execute, and the calls that they make of ``torch.fx``."""

    steps = nodes = 0

    def _line(self, _frame, event, _arg):
        self.steps += event == "line"
        return self._line

    def _call(self, frame, _event, _arg):
        if frame.f_code.co_filename.startswith(PACKAGE):
            return self._line
        self.steps += frame.f_code.co_filename.startswith(FX)
        return None

    def _counted(self, run, *args):
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return run(*args)
        finally:
            sys.settrace(before)

    def _trace(self, gm, inputs):
        with mock.patch.object(tracing, "on_dynamo", partial(self._counted, on_dynamo)):
            return super()._trace(gm, inputs)

    def _rewrite(self, graph: Graph, record, **how) -> None:
        self.nodes = len(graph.nodes)
        self._counted(partial(super()._rewrite, **how), graph, record)


def passed(family, n: int) -> Counted:
    torch.manual_seed(0)
    harness = Counted(gate="always")
    harness.train(family(n), torch.randn(8, D, requires_grad=True))
    return harness


@pytest.mark.parametrize(("family", "sizes"), [(stack, (2, 5)), (chain, (20, 50))])
def test_steps_grow_as_n_log_n(family, sizes):
    passed(family, 1)  # what is loaded once
    found = [passed(family, n) for n in sizes]
    rates = [h.steps / (h.nodes * math.log2(h.nodes)) for h in found]
    assert max(rates) < 1.6 * rates[0], [(h.nodes, h.steps) for h in found]


def test_a_long_chain_is_one_epilogue():
    """With ``strict``: nothing recurses once an op."""
    limit = sys.getrecursionlimit()
    n = 330  # of five ops each three: more than Python recurses then
    harness = Harness(gate="always")
    x, function = torch.randn(4, D), chain(n)
    sys.setrecursionlimit(500)
    try:
        found = harness.run(function, x)
    finally:
        sys.setrecursionlimit(limit)
    torch.testing.assert_close(found, function(x).detach())
    assert len(harness.fused[0].absorbed) > 500
