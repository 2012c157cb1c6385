# SPDX-License-Identifier: Apache-2.0
"""Warnings once per process, before a model compiles: no kernel will run, or
DistributedDataParallel splits the model.

They are not errors, even with ``strict``, which is about single sites that fail. Without kernels,
programs run as plain torch ops, which is how models are developed and tested on a CPU. With
``options={"reference": True}`` the user asks for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from coda_inductor.log import logger
from coda_inductor.mainloop import availability
from coda_inductor.matching import bodies
from coda_inductor.options import Options
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.select import gate
from coda_inductor.select.device import gpu_of

#: The warnings that this process has logged: "kernels", "ddp".
told: set[str] = set()

_PRODUCTS = {"linear", "matmul", "mm", "addmm", "einsum"}


def before_compile(gm: GraphModule, inputs: Sequence[Any], options: Options) -> None:
    """Log the warnings that apply, once per process; ``gm`` and ``inputs`` are Dynamo's."""
    if cut_by_ddp(gm):
        _tell(
            "ddp",
            "DistributedDataParallel cut this graph at its gradient buckets, in the middle of "
            "norms and gates: little of it fuses. Set torch._dynamo.config.optimize_ddp = False "
            "and compile the blocks of the model (for block in model.layers: "
            "block.compile(backend='coda')) before DistributedDataParallel(model): gradients are "
            "then sent while the preceding block computes. docs/distributed.md compares the ways",
        )
    if "kernels" not in told and (reason := no_kernels(gm, inputs, options)) is not None:
        _tell(
            "kernels",
            f"no GEMM becomes a kernel here: {reason}. Results are correct, but not faster than "
            "torch.compile's. If you want plain torch ops here, set "
            "options={'reference': True}",
        )


def no_kernels(gm: GraphModule, inputs: Sequence[Any], options: Options) -> Refusal | None:
    """Why no product in ``gm`` can become a kernel; None if one may, if there is no product, or if
    the options exclude kernels."""
    if options.reference or options.gate == "never" or not _has_product(gm):
        return None
    if (why := availability.kernel_stack()) is not None:
        return why
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    gpu = next((d for d in devices if d.type == "cuda"), None)
    if gpu is None:
        text = "the model is not on a GPU, but this machine has one: model.cuda()"
        return refuse("no-kernels-on-device", text)
    asked = options.gate == "auto" and options.tune == "never"
    return gate.unmeasured(gpu_of(gpu)) if asked else None


def cut_by_ddp(gm: GraphModule) -> bool:
    """Is ``gm`` a part of the graph that Dynamo captured? Torch's DDPOptimizer marks each part; it
    passes on a graph that fits into one bucket unchanged and without mark."""
    why = getattr(gm, "compile_subgraph_reason", None)
    return "DDPOptimizer" in str(getattr(why, "reason", ""))


def _has_product(gm: GraphModule) -> bool:
    calls = (node for body in bodies(gm.graph) for node in body.graph.nodes)
    names = (str(getattr(n.target, "__name__", n.target)) for n in calls)
    return any(name.split(".")[0] in _PRODUCTS for name in names)  # mm, and aten's mm.default


def _tell(what: str, text: str) -> None:
    if what not in told:
        told.add(what)
        logger.warning("%s", text)
