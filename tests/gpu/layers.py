# SPDX-License-Identifier: Apache-2.0
"""A small layer, and how the GPU tests compile it and measure errors."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn
from zoo.layers import Layer


def make(dtype=torch.bfloat16, **how) -> Layer:
    torch.manual_seed(0)
    return Layer(**how).cuda().to(dtype).eval()


def compiled(model, **options):
    return torch.compile(model, backend="coda", options={"gate": "always", **options})


def errors(outputs, exact) -> list[float]:
    return [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(outputs, exact, strict=True)
    ]


#: Our error is at most torch.compile's, times this. Outputs may also be as far off as eager's:
#: torch.compile keeps the residual stream in float32 between two of its kernels (gotchas.md).
SLACK = 1.2


def outcome(call, model, xs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and the gradients of the inputs and parameters that want one; none under no_grad."""
    outputs = list(call(*xs))
    wanted = [t for t in (*xs, *model.parameters()) if t.requires_grad]
    if not outputs[0].requires_grad:
        return outputs, []
    torch.manual_seed(2)
    tangents = [torch.randn_like(o, dtype=torch.float32).to(o.dtype) for o in outputs]
    return outputs, list(torch.autograd.grad(outputs, wanted, tangents))


def assert_as_good(
    model: nn.Module,
    ours: Callable,
    xs: Sequence[torch.Tensor],
    *,
    like_eager: bool = False,
    around: Callable = lambda function: function,
) -> None:
    """Compare ``ours`` with the model in float32. ``like_eager``: the gradients too may be as far
    off as eager's; ``around``: what ours, torch.compile and eager run in, autocast, say."""
    wide = copy.deepcopy(model).float()
    exact_xs = [x.detach().float().requires_grad_(x.requires_grad) for x in xs]
    exact, stock = outcome(wide, wide, exact_xs), copy.deepcopy(model)
    mine, theirs, eager = (
        [errors(have, want) for have, want in zip(outcome(around(f), of, xs), exact, strict=True)]
        for f, of in ((ours, model), (torch.compile(stock), stock), (model, model))
    )
    for part in (0, 1):
        for i, own in enumerate(mine[part]):
            allowed = theirs[part][i]
            if part == 0 or like_eager:
                allowed = max(allowed, eager[part][i])
            assert 0 < own <= SLACK * allowed, (part, i, mine, theirs, eager)
