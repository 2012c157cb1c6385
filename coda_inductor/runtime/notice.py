# SPDX-License-Identifier: Apache-2.0
"""What a user should hear once a process, before a model compiles: that no kernel will run, that
this torch is one that nobody tested, that DistributedDataParallel takes the model apart, and that
torch will compile no more graphs of some code.

None is an error, also not with ``strict``: that is about a site that fails where others work.
Where there are no kernels at all, programs run as plain torch ops, and that is how models are
developed and tested on a CPU. ``options={"reference": True}`` says that it is meant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from coda_inductor.compat import InstructionTranslator, debug_get_cache_entry_list, dynamo_config
from coda_inductor.log import logger
from coda_inductor.mainloop import availability
from coda_inductor.mainloop.requirements import untested_torch
from coda_inductor.matching import bodies
from coda_inductor.options import Options
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.select import gate
from coda_inductor.select.device import gpu_of

#: What this process was told already: "torch", "kernels", "ddp", "last graph".
told: set[str] = set()

#: Who sets a lower limit of graphs than this wants it to be reached.
_LEAST_LIMIT = 4

_PRODUCTS = {"linear", "matmul", "mm", "addmm", "einsum"}


def before_compile(gm: GraphModule, inputs: Sequence[Any], options: Options) -> None:
    """Warn where that is due, once a process; ``gm`` and ``inputs`` are Dynamo's."""
    if (why := untested_torch(torch.__version__)) is not None:
        _tell(
            "torch",
            f"{why}. A pass that meets something new leaves its graph to Inductor; should numbers "
            "be wrong, please report it, and compare with backend='inductor'",
        )
    if cut_by_ddp(gm):
        _tell(
            "ddp",
            "DistributedDataParallel cut this graph at its gradient buckets, in the middle of "
            "norms and gates: little of it fuses. Set torch._dynamo.config.optimize_ddp = False "
            "and compile the blocks of the model (for block in model.layers: "
            "block.compile(backend='coda')) before DistributedDataParallel(model): gradients then "
            "travel while the block in front computes. docs/distributed.md compares the ways",
        )
    if "last graph" not in told and (which := last_graph()) is not None:
        _tell(
            "last graph",
            f"this is {which}: calls that fit none of them run in eager, without coda (an error "
            "with fullgraph=True). Layers of Hugging Face models that are compiled one by one "
            "need model.config.use_cache = False: a cache is filled at each layer's own number, "
            "so that each has a graph of its own. Otherwise TORCH_LOGS=recompiles says what "
            "differs from graph to graph, and torch._dynamo.config.recompile_limit allows more",
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


def last_graph() -> str | None:
    """Which graph of which code Dynamo is compiling now, where torch keeps no more of that code;
    else None. Graphs have a limit each that are of one module only (by a guard on its identity),
    or isolated by torch.compile; they do not count here."""
    frame = _frame()
    limit = getattr(dynamo_config, "recompile_limit", None)
    if frame is None or limit is None:
        return None
    kept = sum(map(_limited, debug_get_cache_entry_list(frame.f_code)))
    if kept + 1 < max(limit, _LEAST_LIMIT):
        return None
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # new in Python 3.11
    if isinstance(module := frame.f_locals.get("self"), torch.nn.Module):
        name = f"{type(module).__name__}.{code.co_name}"  # where classes share their code
    where = f"{name} ({code.co_filename}:{code.co_firstlineno})"
    return f"graph {kept + 1} of {where}, the last that torch compiles of it"


def _frame() -> Any:
    """Dynamo's own of what it compiles; None for a graph that came another way."""
    with contextlib.suppress(AttributeError):
        return InstructionTranslator.current_tx()
    return None


def _limited(entry: Any) -> bool:
    """Does a graph of Dynamo's count towards the limit of its code, whatever is called?"""
    isolated = getattr(entry, "isolate_recompiles_id", -1) >= 0
    return not isolated and not getattr(entry.guard_manager, "id_matched_objs", None)


def _has_product(gm: GraphModule) -> bool:
    calls = (node for body in bodies(gm.graph) for node in body.graph.nodes)
    names = (str(getattr(n.target, "__name__", n.target)) for n in calls)
    return any(name.split(".")[0] in _PRODUCTS for name in names)  # mm, and aten's mm.default


def _tell(what: str, text: str) -> None:
    if what not in told:
        told.add(what)
        logger.warning("coda_inductor: %s", text)
