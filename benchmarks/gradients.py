# SPDX-License-Identifier: Apache-2.0
"""What the training suites share: one step of a module, its gradients in fp32.

A step is the forward and the backward for given gradients of the outputs; it has no loss and no
optimizer, so that nothing but the module is timed.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from .measure import relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from .measure import Call

REFERENCE_ROWS = 2048


def step(
    function: Callable,
    inputs: Sequence[torch.Tensor],
    weights: Iterable[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> Call:
    """Forward and backward of `function`, which uses `weights`.

    Args:
        function: a module or a function of `inputs` that gives a tuple of tensors.
        inputs: its arguments, all requiring gradients.
        weights: its parameters.
        tangents: the gradients of its outputs, same shapes and dtypes.

    Returns:
        a call that gives the gradients of `inputs`, then of `weights`.
    """
    wanted = [*inputs, *weights]
    return lambda: torch.autograd.grad(function(*inputs), wanted, tangents)


def names(module: nn.Module, inputs: Sequence[str]) -> list[str]:
    """What :func:`step` returns gradients of: the names `inputs`, then each weight's layer."""
    return [*inputs, *(name.removesuffix(".weight") for name, _ in module.named_parameters())]


def reference(
    module: nn.Module, inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients in fp32, eager, with `module`'s weights upcast.

    The rows must be independent: the work is done in chunks of rows, and the gradients of the
    weights are the sums over the chunks, so that memory is bounded at any width.

    Args:
        module: as in :func:`step`.
        inputs: its arguments, (1, M, width).
        tangents: the gradients of its outputs, (1, M, ...).

    Returns:
        the outputs, and the gradients of `inputs` and then of the parameters.
    """
    exact = copy.deepcopy(module).float()
    weights = list(exact.parameters())
    sums = [torch.zeros_like(weight) for weight in weights]
    outputs, gradients = [], []
    split = [[*tensor.detach().split(REFERENCE_ROWS, dim=1)] for tensor in (*inputs, *tangents)]
    for chunk in zip(*split, strict=True):
        own = [part.float().requires_grad_() for part in chunk[: len(inputs)]]
        results = exact(*own)
        found = torch.autograd.grad(
            results, [*own, *weights], [part.float() for part in chunk[len(inputs) :]]
        )
        outputs.append([result.detach() for result in results])
        gradients.append(found[: len(own)])
        torch._foreach_add_(sums, found[len(own) :])
    return _joined(outputs), [*_joined(gradients), *sums]


def _joined(chunks: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)]


def errors(
    labels: Sequence[str], values: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Relative error (:func:`benchmarks.measure.relative_error`) of each value by its label."""
    return {
        label: relative_error(value.detach().reshape(truth.shape), truth)
        for label, value, truth in zip(labels, values, truths, strict=True)
    }
