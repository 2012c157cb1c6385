# SPDX-License-Identifier: Apache-2.0
"""Try a pattern on its own example: the backend's passes run, and the result runs eagerly, so that
only the rewriting can change a number.

The example is the smallest graph around a pattern: its tensors are results of GEMMs of one input,
and a GEMM reads the result::

    result = idiom(x @ w0, x @ w1) @ down
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coda_inductor.compat import counters
from coda_inductor.options import parse
from coda_inductor.patterns import Pattern
from coda_inductor.patterns.meaning import Signature
from coda_inductor.record import Record
from coda_inductor.semantic.define import parameters
from coda_inductor.tracing import dry_run

ROWS, K, N = 24, 32, 40


class Example(nn.Module):
    """``idiom``, one spelling of a pattern, between GEMMs, as a module. Inputs are ``ROWS`` x
    ``K``, tensors ``ROWS`` x ``N``. ``example``: a shape for each tensor and a value for each
    number, by parameter. Tensors shaped like the first one are results of GEMMs; others are
    parameters of N columns."""

    def __init__(self, idiom: Callable[..., Tensor], example: Mapping[str, Any]):
        super().__init__()
        names = parameters(idiom)
        shapes = {p: tuple(example[p]) for p in names if isinstance(example[p], (tuple, list))}
        first = next(iter(shapes.values()))
        self.idiom = idiom
        self.numbers = {p: example[p] for p in names if p not in shapes}
        self.inputs = [p for p, shape in shapes.items() if shape == first]
        self.weights = nn.ParameterDict({p: torch.randn(K, N) * K**-0.5 for p in self.inputs})
        self.others = nn.ParameterDict(
            {p: torch.randn(*(N for _ in s)) for p, s in shapes.items() if p not in self.inputs}
        )
        self.down = nn.Parameter(torch.randn(N, K) * N**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Run the example: (ROWS, K) -> (ROWS, K)."""
        projections = {p: x @ self.weights[p] for p in self.inputs}
        others = {p: self.others[p] for p in self.others}
        return self.idiom(**projections, **others, **self.numbers) @ self.down


def example_of(pattern: Pattern) -> dict[str, Any]:
    """The pattern's example, completed from its meaning: shapes, and for numbers 1.5, 1.75, ..."""
    example = dict(pattern.examples[0]) if pattern.examples else {}
    if pattern.meaning is not None:
        signature = Signature(pattern.meaning)
        for i, name in enumerate(signature.names):
            value = 1.5 + 0.25 * i if signature.is_number(name) else (ROWS, N)
            example.setdefault(name, value)
    return example


def cannot_run(pattern: Pattern, idiom: Callable[..., Tensor]) -> str | None:
    """Why the example does not run with ``idiom``, or None: some idioms are only for matching."""
    try:
        Example(idiom, example_of(pattern))(torch.randn(ROWS, K))
    except Exception as error:
        return f"its example does not run: {type(error).__name__}: {error}"
    return None


class Trial:
    """One run: a torch.compile backend that runs our passes, then the aten graphs eagerly.

    Attributes:
        results, eager: the output and the gradients, with our passes and without.
        raised: how often the pattern's op was put into Dynamo's graph.
        counts: the counters of the passes.
        left: the pattern's aten ops that no GEMM absorbed.
        record: has the report, of GEMMs and near misses.
    """

    def __init__(self, pattern: Pattern, path: str, disable: tuple[str, ...]):
        self.pattern, self.raised = pattern, 0
        self.left: list[str] = []
        self.results: list[Tensor] = []
        self.eager: list[Tensor] = []
        self.counts: dict[str, int] = {}
        options = {"strict": True, "patterns": [path], "disable": list(disable)}
        self.record = Record(parse(None, options), "check")

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        traced = dry_run(gm, inputs, self.record)
        self.raised += sum(node.target is self.pattern.op for node in gm.graph.nodes)
        for node in traced.whole.nodes:
            name, _ = node.meta.get("coda_pattern", ("", ""))
            if name.startswith(self.pattern.name) and torch.Tag.pointwise in node.target.tags:
                self.left.append(str(node.target))
        return traced.call

    @property
    def traffic(self) -> int:
        """The bytes that GEMMs read and write."""
        return sum(site.bytes_after for site in self.record.report.sites)

    @property
    def absorbed(self) -> int:
        """The number of ops that run in the epilogues of GEMMs."""
        return sum(len(site.absorbed) for site in self.record.report.sites)


def try_out(
    pattern: Pattern, path: str, idiom: Callable[..., Tensor], *, dtype: torch.dtype,
    disable: tuple[str, ...] = (),
) -> Trial:  # fmt: skip
    """Run the example with ``idiom``, in ``dtype``. The names in ``disable`` are disabled. Raises
    CodaError: whatever fails inside the passes."""
    torch.manual_seed(0)
    model = Example(idiom, example_of(pattern)).to(dtype)
    x, dy = (torch.randn(ROWS, K, dtype=dtype) for _ in range(2))
    trial = Trial(pattern, path, disable)
    torch.compiler.reset()
    counters["coda"].clear()
    trial.results = step(torch.compile(model, backend=trial), model, x, dy)
    trial.counts = dict(counters["coda"])
    trial.eager = step(model, model, x, dy)
    return trial


def step(function: Callable[..., Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Forward and backward: the output, the gradients of ``x`` and of the model's parameters."""
    x = x.clone().requires_grad_()
    output = function(x)
    return [output.detach(), *torch.autograd.grad(output, [x, *model.parameters()], dy)]
