# SPDX-License-Identifier: Apache-2.0
"""Try a pattern on its own example: the backend's passes run, and the result runs eagerly, so that
only the rewriting can change a number.

The example is the smallest graph around a pattern: its tensors are results of GEMMs of one input,
and a GEMM reads the result::

    result = idiom(x @ w0, x @ w1) @ down
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coda_inductor.compat import counters
from coda_inductor.options import parse
from coda_inductor.patterns import Pattern
from coda_inductor.patterns.meaning import Signature
from coda_inductor.record import Record
from coda_inductor.report import SiteReport
from coda_inductor.semantic.define import parameters
from coda_inductor.tracing import dry_run

ROWS, K, N = 24, 32, 40


class Example(nn.Module):
    """``idiom`` between GEMMs, as a module. Inputs are ``ROWS`` x ``K``, tensors ``ROWS`` x ``N``.

    Args:
        idiom: one spelling of the pattern.
        example: a shape for each tensor and a value for each number, by parameter. Tensors shaped
            like the first one are results of GEMMs; others are parameters of N columns.
    """

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


@dataclass
class Trial:
    """One run: the output and the gradients, rewritten (``results``) and ``eager``, and the work of
    the passes. ``left``: the pattern's aten ops that no GEMM absorbed; ``refused``: the near misses
    of the report."""

    results: list[Tensor]
    eager: list[Tensor]
    raised: int
    counts: dict[str, int]
    sites: list[SiteReport]
    left: list[str]
    refused: list[str]

    @property
    def traffic(self) -> int:
        """The bytes that GEMMs read and write."""
        return sum(site.bytes_after for site in self.sites)

    @property
    def absorbed(self) -> int:
        """The number of ops that run in the epilogues of GEMMs."""
        return sum(len(site.absorbed) for site in self.sites)


def try_out(
    pattern: Pattern,
    path: str,
    idiom: Callable[..., Tensor],
    *,
    dtype: torch.dtype,
    disable: tuple[str, ...] = (),
) -> Trial:
    """Run the example with ``idiom``, in ``dtype``. The names in ``disable`` are disabled.

    Raises:
        CodaError: whatever fails inside the passes.
    """
    torch.manual_seed(0)
    model = Example(idiom, example_of(pattern)).to(dtype)
    x, dy = (torch.randn(ROWS, K, dtype=dtype) for _ in range(2))
    backend = _Passes(pattern, path, disable)
    torch.compiler.reset()
    counters["coda"].clear()
    results = step(torch.compile(model, backend=backend), model, x, dy)
    report, counts = backend.record.report, dict(counters["coda"])
    work = backend.raised, counts, report.sites, backend.left, report.near_misses
    return Trial(results, step(model, model, x, dy), *work)


def step(function: Callable[..., Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Forward and backward: the output, the gradients of ``x`` and of the model's parameters."""
    x = x.clone().requires_grad_()
    output = function(x)
    return [output.detach(), *torch.autograd.grad(output, [x, *model.parameters()], dy)]


class _Passes:
    """A torch.compile backend: our passes, then the aten graphs, which run eagerly."""

    def __init__(self, pattern: Pattern, path: str, disable: tuple[str, ...]):
        self.pattern, self.raised = pattern, 0
        self.left: list[str] = []
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
