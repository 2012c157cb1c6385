# SPDX-License-Identifier: Apache-2.0
"""A small layer, and how the GPU tests compile it and measure errors."""

import torch
from zoo.layers import Layer

#: Our error is at most eager's, times this.
SLACK = 1.2


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


def agree(run, model, *xs) -> None:
    """Hold what ``run`` gives to the model in float64."""
    with torch.no_grad():
        have, want = run(*xs), model(*xs)
        exact = model.double()(*(x.double() for x in xs))
        model.bfloat16()
    for ours, theirs in zip(errors(have, exact), errors(want, exact), strict=True):
        assert 0 < ours <= SLACK * theirs
