"""Run our passes without Inductor's code generation: fast, and the graphs stay visible.

``Harness`` is a torch.compile backend: it raises, traces with AOTAutograd, runs the joint pass and
executes the resulting aten graph eagerly. ``harness.graph`` is that graph, ``harness.report`` what
happened, ``harness.counts`` the counters of this compile.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table

from coda_inductor.backend import raise_pass
from coda_inductor.debug import Recorder
from coda_inductor.joint import JointPass
from coda_inductor.options import parse


class Harness:
    """A backend that keeps what it did. Options are those of ``backend="coda"``; strict by default,
    so that a failure of ours is an error and not a silent fallback."""

    def __init__(self, **options: Any):
        self.options = parse(None, {"strict": True, **options})
        self.recorder = Recorder("test", None)
        self.graph: torch.fx.Graph | None = None

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise_pass(gm, inputs, self.options, self.recorder)
        self.raised = gm.graph
        return aot_autograd(
            fw_compiler=self._compile,
            inference_compiler=self._compile,
            decompositions=select_decomp_table(),
        )(gm, inputs)

    def _compile(self, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        JointPass(self.options, self.recorder)(gm.graph)
        gm.recompile()
        self.graph = gm.graph
        return make_boxed_func(gm.forward)

    def run(self, function: Any, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Any:
        """Compile ``function`` with this backend under no_grad and call it once."""
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            result = torch.compile(function, backend=self, dynamic=dynamic)(*args, **kwargs)
        self.counts = Counter(counters["coda"])
        return result

    @property
    def report(self):
        return self.recorder.report

    @property
    def fused(self) -> list[Any]:
        """Reports of the GEMMs that were fused, in order."""
        return [site for site in self.report.sites if site.fused]

    def ops(self) -> Counter:
        """How often each target occurs in the final graph."""
        return Counter(str(n.target) for n in self.graph.nodes if n.op == "call_function")
