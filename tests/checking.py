# SPDX-License-Identifier: Apache-2.0
"""What the tests of the graph passes share: compile, compare with eager, look at the graph."""

import copy
import dataclasses
from typing import Any

import torch
from harness import Harness
from torch import nn
from torch.utils._pytree import tree_leaves

from coda_inductor import patterns, pipeline
from coda_inductor.dynamo import late_gradients
from coda_inductor.dynamo.attention import calls
from coda_inductor.lowering import lower
from coda_inductor.plan import Plan
from coda_inductor.rewrite import embedding, tables
from coda_inductor.select.choice import Choice

#: The op of the built-in pattern.
swiglu = patterns.load_file(patterns.builtin_folder() / "swiglu.py")[0].op

# A wrong rewrite is off by far more than the rounding of a sum in another order.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check(function, *args, dynamic=None, tolerance=None, strides=False, **options) -> Harness:
    """Run ``function`` under no_grad in eager and through the passes: same values, shapes, dtypes,
    and ``strides`` if asked. Both get copies of ``args``, which are compared too: mutations must
    agree. ``tolerance`` replaces the one of the result's dtype, where the inputs' is lower."""
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    harness = Harness(**options)
    have = harness.run(function, *ours, dynamic=dynamic)
    with torch.no_grad():
        want = function(*theirs)
    assert_same((have, ours), (want, theirs), tolerance)
    assert not strides or strides_of(have) == strides_of(want)
    return harness


def check_gradients(
    function, *args, dynamic=None, tolerance=None, strides=False, **options
) -> Harness:
    """Run ``function`` forward and backward in eager and through the passes: same outputs, and same
    gradients of its parameters and of those ``args`` that require one."""
    harness = Harness(**options)
    ours, theirs = copy.deepcopy((function, args)), copy.deepcopy((function, args))
    have = harness.train(ours[0], *ours[1], dynamic=dynamic)
    want = theirs[0](*theirs[1])
    assert not strides or strides_of(have) == strides_of(want)
    assert_same((have, differentiate(have, ours)), (want, differentiate(want, theirs)), tolerance)
    return harness


def strides_of(result: Any) -> list[tuple[int, ...]]:
    return [t.stride() for t in tree_leaves(result)]


def differentiate(outputs: Any, of: tuple[Any, Any]) -> list[torch.Tensor | None]:
    """Backpropagate fixed random numbers from every output that has a gradient; returns those of
    the leaves in ``of`` = (function, args)."""
    found = [t for t in tree_leaves(outputs) if getattr(t, "requires_grad", False)]
    generator = torch.Generator().manual_seed(7)
    # The same numbers in every dtype, so that gradients of two dtypes can be compared.
    given = [torch.randn(t.shape, generator=generator).bfloat16().to(t.dtype) for t in found]
    torch.autograd.backward(found, given)
    function, args = of
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    return [t.grad for t in (*parameters, *tree_leaves(args)) if isinstance(t, torch.Tensor)]


def assert_same(have: Any, want: Any, tolerance: float | None = None) -> None:
    """Equal trees of tensors, up to a tolerance relative to the largest element."""
    have, want = tree_leaves(have), tree_leaves(want)
    assert len(have) == len(want)
    for left, right in zip(have, want, strict=True):
        if not isinstance(right, torch.Tensor):
            assert left == right
            continue
        bound = TOLERANCE.get(right.dtype, 0) if tolerance is None else tolerance
        scale = (
            right.detach().double().nan_to_num(0, 0, 0).abs().max().item() if right.numel() else 0
        )
        torch.testing.assert_close(left, right, rtol=bound, atol=bound * scale, equal_nan=True)


def side_by_side(functions: Any, *shapes: tuple[int, ...]) -> tuple[Any, list[torch.Tensor]]:
    """A function that calls each of ``functions`` with tensors of its own, of ``shapes``, and those
    tensors: one graph compiles faster than many."""
    functions, n = list(functions), len(shapes)

    def all_of_them(*tensors: torch.Tensor) -> list[Any]:
        return [f(*tensors[n * i : n * i + n]) for i, f in enumerate(functions)]

    return all_of_them, [randn(*shape) for _ in functions for shape in shapes]


class SideBySide(nn.ModuleList):
    """Models in one graph, each of an input of its own."""

    def forward(self, *inputs: torch.Tensor) -> list[Any]:
        return [model(x) for model, x in zip(self, inputs, strict=True)]


class Weights(nn.Module):
    """``function(x, *weights)`` as a module: parameters keep static sizes when x is dynamic."""

    def __init__(self, function: Any, *weights: torch.Tensor):
        super().__init__()
        self.function, self.weights = function, nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> Any:
        # Dynamo of torch 2.11 does not unpack a ParameterList.
        return self.function(x, *[self.weights[i] for i in range(len(self.weights))])


def raised(harness: Harness, op: Any) -> int:
    """How often ``op`` stands in the graph after the raise pass."""
    return sum(node.target is op for node in harness.raised.nodes)


def reasons(harness: Harness) -> str:
    """Every reason that the report gives: near misses, then the GEMMs that were not fused."""
    left = (site.reason for site in harness.report.sites if not site.fused)
    return "\n".join([*harness.report.near_misses, *left])


def leave_custom_ops(monkeypatch: Any, config: str = "128x128:2x1:pp") -> None:
    """Let fused sites stay ``gemm_epilogue`` calls, as on CUDA, with partials of several tiles."""
    monkeypatch.setattr(Plan, "judge", lambda *_: Choice("kernel", config))
    monkeypatch.setattr(lower.pool, "wait", dict.fromkeys)  # every request: no error
    monkeypatch.setattr(lower.pool, "submit", len)


def replace_pass(monkeypatch: Any, name: str, run: Any, **how: Any) -> Any:
    """Let ``run(function)`` take the place of the function of the pass ``name``, with ``how`` in
    place of what else it has; returns it."""
    made = None
    for stage in ("ON_DYNAMO", "ON_ATEN"):
        passes = list(getattr(pipeline, stage))
        for i, each in enumerate(passes):
            if each.name == name:
                made = run(each.run)
                passes[i] = dataclasses.replace(each, run=made, **how)
        monkeypatch.setattr(pipeline, stage, tuple(passes))
    assert made is not None, "a pass has that name"
    return made


def slice_logits(monkeypatch: Any, size: int) -> None:
    """Let the gradient of logits be made in slices of ``size`` bytes, whatever that saves."""
    monkeypatch.setattr("coda_inductor.semantic.loss.SLICE_BYTES", size)
    monkeypatch.setattr("coda_inductor.rewrite.loss.slices.no_gain", lambda *_: "")


def count_as_large(monkeypatch: Any) -> None:
    """Let small tensors count as large, and a CPU for a GPU, in passes that ask."""
    slice_logits(monkeypatch, 2**8)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 0)
    monkeypatch.setattr(embedding, "LEAST_ROWS", 1)
    monkeypatch.setattr(tables, "LEAST_READS", 1)
    monkeypatch.setattr(calls, "GROUPS_ON", "cpu")


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal inputs, of both signs, float64 unless said otherwise."""
    return torch.randn(shape, dtype=torch.float64).to(dtype)
