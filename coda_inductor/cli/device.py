# SPDX-License-Identifier: Apache-2.0
"""A pattern between real GEMMs on a device: its error against float32 and its speed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from coda_inductor import backend
from coda_inductor.cli.speed import medians
from coda_inductor.cli.trial import Example, example_of
from coda_inductor.patterns import Pattern

#: Rows, and the widths of Llama-3.2-1B: K in front, N between.
SIZES = (8192, 2048, 8192)


class Layer:
    """The example of a pattern in bfloat16 and what runs it: eager, torch.compile and coda.

    Args:
        pattern: what the layer has,
        idiom: in this spelling.
        path: the pattern's file.
        device: where.
        sizes: rows, K and N.
    """

    def __init__(
        self,
        pattern: Pattern,
        idiom: Callable[..., Tensor],
        path: str,
        device: torch.device,
        sizes: tuple[int, int, int] = SIZES,
    ):
        torch.manual_seed(0)
        rows, k, n = sizes
        model = Example(idiom, example_of(pattern), k, n).to(device, torch.bfloat16)
        self.model = model
        self.x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        self.dy = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        torch.compiler.reset()
        coda = functools.partial(backend.coda, options={"patterns": [path]})
        self.variants: dict[str, Callable[[Tensor], Tensor]] = {
            "eager": model,
            "torch.compile": torch.compile(model),
            "coda": torch.compile(model, backend=coda),
        }

    def step(self, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Forward and backward; the output and the gradients of input and parameters."""
        x = self.x.clone().requires_grad_()
        output = function(x)
        return [
            output.detach(),
            *torch.autograd.grad(output, [x, *self.model.parameters()], self.dy),
        ]


def errors(layer: Layer) -> dict[str, float]:
    """The largest relative error (Frobenius) of output and gradients against float32."""
    wide = copy.copy(layer)
    wide.model = copy.deepcopy(layer.model).float()
    wide.x, wide.dy = layer.x.float(), layer.dy.float()
    want = wide.step(wide.model)
    found = {}
    for name, function in layer.variants.items():
        have = layer.step(function)
        found[name] = max(
            ((h.float() - w).norm() / w.norm()).item() for h, w in zip(have, want, strict=True)
        )
    return found


def times(layer: Layer, rounds: int = 30) -> dict[str, dict[str, float]]:
    """Milliseconds of the forward pass under ``no_grad``, and of forward and backward."""

    def forward(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return function(layer.x)

        return call

    def train(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: layer.step(function)

    return {
        what: medians({name: make(f) for name, f in layer.variants.items()}, rounds)
        for what, make in (("forward", forward), ("forward and backward", train))
    }
