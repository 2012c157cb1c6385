# SPDX-License-Identifier: Apache-2.0
"""Run our passes without Inductor's code generation: fast, and the graphs stay visible.

``Harness`` is a torch.compile backend: it raises, traces with AOTAutograd, runs the joint pass and
executes the resulting aten graph eagerly. ``harness.graph`` is that graph, ``harness.report`` what
happened, ``harness.counts`` the counters of this compile. When it trains, ``harness.graph`` is the
joint graph, ``harness.parts`` are the forward and backward graphs that it was partitioned into and
``harness.saved`` what the one leaves for the other. ``Stock`` does the same without us.
"""

from collections import Counter
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.utils import counters

from coda_inductor.joint import rewrite
from coda_inductor.options import parse
from coda_inductor.record import Record
from coda_inductor.tracing import Traced, dry_run, trace


def as_it_is(gm: torch.fx.GraphModule, _inputs: Any, **_how: Any) -> Any:
    """In place of Inductor's ``compile_fx_inner``: the graph runs op by op."""
    return make_boxed_func(gm.forward)


class Harness:
    """A backend that keeps what it did. Options are those of ``backend="coda"``; strict by default,
    so that a failure of ours is an error and not a silent fallback."""

    def __init__(self, **options: Any):
        self.options = parse(None, {"strict": True, **options})
        self.record = Record(self.options, "test")
        self.graph: torch.fx.Graph | None = None
        self.parts: list[torch.fx.Graph] = []
        self.saved: list[torch.fx.Node] = []
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        traced = self._trace(gm, inputs)
        self.raised = gm.graph
        self.graph, self.saved = traced.whole, traced.saved
        if traced.training:
            self.parts += traced.graphs
        return traced.call

    def _trace(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Traced:
        return dry_run(gm, inputs, self.record, self._rewrite)

    def _rewrite(self, graph: torch.fx.Graph, record: Record, **how: Any) -> None:
        rewrite(graph, record, **how)

    def train(self, function: Any, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Any:
        """Compile ``function`` with this backend and call it once, ready for a backward pass."""
        torch._dynamo.reset()
        counters.clear()
        result = torch.compile(function, backend=self, dynamic=dynamic)(*args, **kwargs)
        self.counts = Counter(counters["coda"])
        return result

    def run(self, function: Any, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Any:
        """The same under no_grad."""
        with torch.no_grad():
            return self.train(function, *args, dynamic=dynamic, **kwargs)

    @property
    def report(self):
        return self.record.report

    @property
    def fused(self) -> list[Any]:
        """Reports of the GEMMs that were fused, in order."""
        return [site for site in self.report.sites if site.fused]

    def ops(self, graph: torch.fx.Graph | None = None) -> Counter:
        """How often each target occurs in ``graph``, by default the final one."""
        graph = self.graph if graph is None else graph
        return Counter(str(n.target) for n in graph.nodes if n.op == "call_function")

    def saved_bytes(self) -> int:
        """Size of what the forward pass leaves for the backward, parameters and inputs aside."""
        tensors = [n.meta["val"] for n in self.saved if n.op != "placeholder"]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


class Stock(Harness):
    """What torch.compile would have had without us."""

    def _trace(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Traced:
        return trace(gm, inputs)
