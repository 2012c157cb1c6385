# SPDX-License-Identifier: Apache-2.0
"""What a user should hear once a process, before a model compiles: that no kernel will run, and
that DistributedDataParallel takes the model apart.

None is an error, also not with ``strict``: that is about a site that fails where others work.
Where there are no kernels at all, programs run as plain torch ops, and that is how models are
developed and tested on a CPU. ``options={"reference": True}`` says that it is meant.
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

#: What this process was told already: "kernels", "ddp".
told: set[str] = set()

_PRODUCTS = {"linear", "matmul", "mm", "addmm", "einsum"}


def before_compile(gm: GraphModule, inputs: Sequence[Any], options: Options) -> None:
    """Warn where that is due, once a process; ``gm`` and ``inputs`` are Dynamo's."""
    if cut_by_ddp(gm):
        _tell(
            "ddp",
            "DistributedDataParallel cut this graph at its gradient buckets, in the middle of "
            "norms and gates: little of it fuses. Set torch._dynamo.config.optimize_ddp = False "
            "and compile the blocks of the model (for block in model.layers: "
            "block.compile(backend='coda')) before DistributedDataParallel(model): gradients then "
            "travel while the block in front computes. docs/distributed.md compares the ways",
        )
    if "kernels" not in told and (reason := no_kernels(gm, inputs, options)) is not None:
        _tell(
            "kernels",
            f"no GEMM becomes a kernel here: {reason}. Results are right all the same, but no "
            "faster than torch.compile's. If you want plain torch ops here, set "
            "options={'reference': True}",
        )


def no_kernels(gm: GraphModule, inputs: Sequence[Any], options: Options) -> Refusal | None:
    """Why no product in ``gm`` can become a kernel whatever surrounds it, or None: one may, there
    is no product, or the options ask for none."""
    if options.reference or options.gate == "never" or not _has_product(gm):
        return None
    if (why := availability.kernel_stack()) is not None:
        return why
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    gpu = next((d for d in devices if d.type == "cuda"), None)
    if gpu is None:
        text = "the model is on no GPU, while this machine has one: model.cuda()"
        return refuse("no-kernels-on-device", text)
    asked = options.gate == "auto" and options.tune == "never"
    return gate.unmeasured(gpu_of(gpu)) if asked else None


def cut_by_ddp(gm: GraphModule) -> bool:
    """Is ``gm`` a piece of the graph that Dynamo captured? Torch's DDPOptimizer says so of each
    that it makes; a graph that fits into one bucket it hands over whole, and says nothing."""
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
