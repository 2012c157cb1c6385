# SPDX-License-Identifier: Apache-2.0
"""Suite `model_train`: training steps of whole, unmodified models of ``transformers``.

Random bf16 weights, HF's own loss; a step is forward and backward, with
the fused AdamW behind it where the job asks for one. Gradients are freed at the end of a step, so
that a step's peak holds them and the variants between two steps do not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters

from . import models
from .measure import MIB, Call, Variants, register, relative_error
from .tables import WITHOUT

if TYPE_CHECKING:
    from .runner import Job

LEARNING_RATE = 1e-5
#: A parameter's gradient below this share of all gradients' norm is zero but for rounding: that of
#: a key's bias, which a softmax does not see. It has no relative error.
ZERO = 1e-6


class Trained:
    """A model in training mode with its compiled form, its batch and maybe its optimizer.

    Args:
        model: what holds the parameters.
        batch: its keyword arguments, labels among them.
        backend: torch.compile backend, or None for eager.
        checkpoint: recompute each layer's activations in the backward (HF's own switch).
        optimizer: end each step with a fused AdamW step.
        liger: patch the model with Liger's kernels first.
        options: of torch.compile.
    """

    def __init__(
        self,
        model: Any,
        batch: models.Batch,
        backend: str | None = None,
        checkpoint: bool = False,
        optimizer: bool = False,
        liger: bool = False,
        options: dict[str, Any] | None = None,
    ):
        self.model = model.train()
        self.around = models.liger(model) if liger else contextlib.nullcontext
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.function = model
        if backend is not None:
            register(backend)
            self.function = torch.compile(model, backend=backend, options=options)
        self.batch = dict(batch)
        if hasattr(model.config, "use_cache"):
            self.batch["use_cache"] = False
        self.optimizer = None
        if optimizer:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def loss(self) -> torch.Tensor:
        """The model's own loss, a scalar."""
        with self.around():
            return self.function(**self.batch).loss

    def step(self) -> None:
        """One training step; leaves no gradients."""
        self.loss().backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss, and the gradients of all parameters by name; the model keeps none of them."""
        loss = self.loss()
        loss.backward()
        found = {name: weight.grad for name, weight in self.model.named_parameters()}
        self.model.zero_grad(set_to_none=True)
        return loss.item(), found

    def held_mib(self) -> float:
        """MiB of the parameters and of the optimizer's state."""
        tensors = list(self.model.parameters())
        if self.optimizer is not None:
            states = self.optimizer.state.values()
            tensors += [t for state in states for t in state.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB


def _accuracy(model: Any, batch: models.Batch, trained: dict[str, Trained], result: dict) -> dict:
    """Relative errors of all gradients of each variant as one vector and of its worst parameter.

    That parameter's name goes into ``result["worst_parameter"]``, the losses into
    ``result["loss"]``. A gradient that is nothing but rounding (``ZERO``) is no candidate. The
    reference is eager fp32 with the same weights; it recomputes activations, which changes no value
    and lets it fit beside the models measured.
    """
    batch = {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}
    exact_loss, exact = Trained(copy.deepcopy(model).float(), batch, checkpoint=True).gradients()
    norm = sum(truth.square().sum() for truth in exact.values()).sqrt()
    real = [p for p, truth in exact.items() if truth.norm() > ZERO * norm]
    accuracy = {}
    result["loss"], result["worst_parameter"] = {"exact": exact_loss}, {}
    for name, own in trained.items():
        loss, found = own.gradients()
        off = sum((found[p].float() - truth).square().sum() for p, truth in exact.items()).sqrt()
        each = {p: relative_error(found.pop(p), exact[p]) for p in real}
        worst = max(each, key=lambda p: each[p])
        result["loss"][name], result["worst_parameter"][name] = loss, worst
        accuracy[name] = {"all gradients": (off / norm).item(), "worst parameter": each[worst]}
    return accuracy


def run(job: Job, variants: Variants) -> dict:
    """Measure one model (`job.size`) with `job.length` tokens a step; :mod:`benchmarks.runner` has
    the fields of `job`.

    Returns:
        what :meth:`Variants.measure` does, with ``"shape"``, ``"profile"``, ``"graph_breaks"`` and,
        without an optimizer (which moves the weights), ``"accuracy": {variant: {"all gradients",
        "worst parameter"}}``, ``"worst_parameter": {variant: name}`` and ``"loss": {variant or
        "exact": loss}``. Each variant also has ``"model_mib"``, its parameters and optimizer state:
        with ``"peak_mib"`` what a process that held this variant alone would peak at.
    """
    model, batch, shape = models.build(job.size, job.length)
    trained: dict[str, Trained] = {}

    def make(name: str, backend: str | None = None, **how: Any) -> Call:
        own = copy.deepcopy(model)
        trained[name] = Trained(own, batch, backend, optimizer=job.optimizer, **how)
        return trained[name].step

    variants.add("eager", lambda: make("eager"))
    variants.add("compile", lambda: make("compile", "inductor"))
    variants.add("coda", lambda: make("coda", job.backend))
    variants.add("liger", lambda: make("liger", liger=True))
    variants.add("liger_compile", lambda: make("liger_compile", "inductor", liger=True))
    again = {"checkpoint": True}
    variants.add("compile_checkpoint", lambda: make("compile_checkpoint", "inductor", **again))
    variants.add("coda_checkpoint", lambda: make("coda_checkpoint", job.backend, **again))
    for pattern in job.without:
        options = {"disable": [pattern]}
        call = functools.partial(make, WITHOUT + pattern, job.backend, options=options)
        variants.add(WITHOUT + pattern, call)
    result = variants.measure(job.rounds)
    working = {name: own for name, own in trained.items() if name in variants.calls}
    for name, own in working.items():
        result["variants"][name]["model_mib"] = own.held_mib()
    optimizer = "fused AdamW" if job.optimizer else None
    result["shape"] = {"optimizer": optimizer, **shape}
    result["profile"] = variants.profile(("coda", "compile"))
    result["graph_breaks"] = sum(counters["graph_break"].values())
    result["accuracy"] = {}
    if not job.optimizer and working:
        accuracy = variants.attempt("accuracy", lambda: _accuracy(model, batch, working, result))
        result["accuracy"] = accuracy or {}
    return result
