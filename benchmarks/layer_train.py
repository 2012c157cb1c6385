# SPDX-License-Identifier: Apache-2.0
"""Suite `layer_train`: forward and backward of the layer of suite `layer`, bf16.

Both inputs and all parameters require gradients; those of the outputs are fixed random tensors. The
step returns all gradients, so that none of them is left out or accumulated anywhere.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import ceiling, gradients, layer
from .measure import Call, Variants, device, register

if TYPE_CHECKING:
    from .runner import Job

INPUTS = ("x0", "y")
TOP_KERNELS = 25


def tangents(block: layer.Block, x0: torch.Tensor) -> list[torch.Tensor]:
    """Random gradients of x2, q, k and v: (1, M, d), (1, M, d) and twice (1, M, kv), as `x0`."""
    widths = [linear.out_features for linear in (block.down_proj, block.q_proj)]
    widths += [linear.out_features for linear in (block.k_proj, block.v_proj)]
    return [torch.randn(*x0.shape[:2], n, device=x0.device).to(x0.dtype) for n in widths]


def _accuracy(variants: Variants, block: layer.Block, inputs: list, given: list) -> dict:
    """Relative error of each gradient of each variant that computes them."""
    _, exact = gradients.reference(block, inputs, given)
    labels = gradients.names(block, INPUTS)
    return {
        name: gradients.errors(labels, call(), exact)
        for name, call in variants.calls.items()
        if not name.startswith("gemms")
    }


def run(job: Job, variants: Variants) -> dict:
    """Measure one size; see :mod:`benchmarks.runner` for the fields of `job`.

    Returns:
        what :meth:`Variants.measure` does, with ``"shape"``, ``"profile"`` and
        ``"accuracy": {variant: {input or layer: error of its gradient}}``.
    """
    block, x0, y = layer.build(job.size, job.length, job.norm)
    inputs = [x0.requires_grad_(), y.requires_grad_()]
    given = tangents(block, x0)

    def compiled(backend: str = "inductor", mode: str | None = None) -> Call:
        register(backend)
        own = copy.deepcopy(block)
        function = torch.compile(own, fullgraph=True, backend=backend, mode=mode)
        return gradients.step(function, inputs, own.parameters(), given)

    variants.add("eager", lambda: gradients.step(block, inputs, block.parameters(), given))
    variants.add("gemms", lambda: layer.gemms(block, x0, y, fused=False, backward=True))
    variants.add("gemms_fused", lambda: layer.gemms(block, x0, y, fused=True, backward=True))
    variants.add("compile", compiled)
    variants.add("coda", lambda: compiled(backend=job.backend))
    if job.ceiling and device() == "cuda":
        path = Path(job.ceiling)
        variants.add("ceiling", lambda: ceiling.make_step(path, block, x0, y, given))
    variants.add_graphs(("compile", "coda"))
    # Last: it takes longest to prepare, and what is not ready in time is left out.
    variants.add("max_autotune", lambda: compiled(mode="max-autotune-no-cudagraphs"))
    variants.add_graphs(("max_autotune",))
    result = variants.measure(job.rounds)
    d, f, kv = layer.widths(job.size)
    result["shape"] = {"M": job.length, "d": d, "f": f, "kv": kv, "norm": job.norm}
    result["profile"] = variants.profile(("coda", "compile", "ceiling"), TOP_KERNELS)
    accuracy = variants.attempt("accuracy", lambda: _accuracy(variants, block, inputs, given))
    result["accuracy"] = accuracy or {}
    return result
