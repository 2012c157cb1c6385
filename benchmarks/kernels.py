# SPDX-License-Identifier: Apache-2.0
"""Suite `kernels`: one block of memory-bound work with its GEMMs at a time, forward and backward.

The forward is timed under ``torch.no_grad()``, the step (forward and backward) with gradients of
all inputs and parameters. Such blocks are short: the device is kept busy while the host launches a
round, so that every figure is device time.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import gradients
from .blocks import BLOCKS
from .layer import SIZES
from .measure import Call, Variants, device, register

if TYPE_CHECKING:
    from collections.abc import Callable

    from .runner import Job

    Made = tuple[Callable, list[torch.Tensor]]  # a function and the weights it computes with

QUEUE_MS = 10.0
STEP = "_train"  # what the name of a variant's step ends in


@torch.no_grad()
def build(block: str, size: str, rows: int, norm: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """A bf16 block of unit-gain random weights and its inputs (1, rows, width), which require
    gradients, on the device.
    """
    torch.manual_seed(0)
    with torch.device(device()):
        module = BLOCKS[block](SIZES[size], norm, rows)
        for weight in module.parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
            else:
                weight.normal_(std=weight.shape[1] ** -0.5)
        inputs = [torch.randn(1, rows, module.width).bfloat16() for _ in module.inputs]
    return module.bfloat16(), [tensor.requires_grad_() for tensor in inputs]


def _gemms(module: nn.Module, operand: torch.Tensor, backward: bool) -> Call:
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    pairs = [(operand[0].detach(), linear.weight.detach()) for linear in linears]
    return gradients.products(pairs, backward)


def _restore(own: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(own, inputs, strict=True):
            target.copy_(source)


def _accuracy(variants: Variants, module: nn.Module, inputs: list, tangents: list) -> dict:
    """Relative error of the outputs of each forward and of the gradients of each step."""
    outputs, exact = gradients.reference(module, inputs, tangents)
    labels = [f"gradient of {name}" for name in gradients.names(module, module.inputs)]
    accuracy: dict[str, dict[str, float]] = {}
    for name, call in variants.calls.items():
        if not name.startswith("gemms"):
            variants.before.get(name, lambda: None)()
            if name.endswith(STEP):
                found = gradients.errors(labels, call(), exact)
            else:
                found = gradients.errors(module.outputs, call(), outputs)
            accuracy.setdefault(name.removesuffix(STEP), {}).update(found)
    return accuracy


def run(job: Job, variants: Variants) -> dict:
    """Measure the block `job.block` at one size; see :mod:`benchmarks.runner` for the fields.

    Returns:
        what :meth:`Variants.measure` does, the steps under ``<variant>_train``, with ``"shape"``,
        ``"profile"`` and ``"accuracy": {variant: {output or gradient: error}}``.
    """
    module, inputs = build(job.block, job.size, job.length, job.norm)
    with torch.no_grad():
        tangents = [torch.randn_like(output) for output in module(*inputs)]

    def both(
        name: str, make: Callable[[], Made], own: list = inputs, given: list = tangents
    ) -> None:
        """Variant `name` and its step, of one function; the step computes on the tensors `own` and
        the gradients `given`.
        """
        made = functools.cache(make)

        def forward() -> Call:
            function, _ = made()
            return torch.no_grad()(lambda: function(*inputs))

        variants.add(name, forward)
        variants.add(name + STEP, lambda: gradients.step(made()[0], own, made()[1], given))

    def compiled(backend: str) -> Made:
        register(backend)
        own = copy.deepcopy(module)
        options = job.options or None if backend == job.backend else None
        function = torch.compile(own, fullgraph=True, backend=backend, options=options)
        return function, list(own.parameters())

    weights = list(module.parameters())
    both("eager", lambda: (module, weights))
    variants.add("gemms", lambda: _gemms(module, inputs[0], backward=False))
    variants.add("gemms" + STEP, lambda: _gemms(module, inputs[0], backward=True))
    both("compile", lambda: compiled("inductor"))
    both("coda", lambda: compiled(job.backend))
    scratch, given = inputs, tangents
    if module.liger_overwrites:
        scratch = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        given = [tensor.clone() for tensor in tangents]
        originals = [*inputs, *tangents]
        variants.before["liger" + STEP] = functools.partial(_restore, [*scratch, *given], originals)
    both("liger", lambda: (module.liger(), weights), scratch, given)
    result = variants.measure(job.rounds, QUEUE_MS)
    d, f, _ = SIZES[job.size]
    result["shape"] = {"M": job.length, "d": d, "f": f, "norm": job.norm}
    result["profile"] = variants.profile(("coda", "compile", "coda" + STEP, "compile" + STEP))
    accuracy = variants.attempt("accuracy", lambda: _accuracy(variants, module, inputs, tangents))
    result["accuracy"] = accuracy or {}
    return result
