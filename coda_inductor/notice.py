# SPDX-License-Identifier: Apache-2.0
"""Warnings, each once per process. Before a model compiles: no kernel will run, or
DistributedDataParallel splits the model. Afterwards: a request of the user had no effect.

They are not errors, even with ``strict``, which is about single sites that fail: without kernels,
programs run as plain torch ops, which is how models are developed and tested on a CPU.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from coda_inductor.gpu import gpu_of
from coda_inductor.kernels import QUACK, measurements_of, unmeasured
from coda_inductor.log import logger
from coda_inductor.matching import bodies
from coda_inductor.options import GEMM, Options
from coda_inductor.patterns import loading
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.table import main_reason

if TYPE_CHECKING:
    from coda_inductor.record import Record

#: The warnings that this process has logged: "kernels", "ddp"; and "fused", "memory", "disable"
#: with a name, and names of patterns where a warning would be wrong since something was found.
logged: set[str] = set()

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
    if "kernels" not in logged and (reason := no_kernels(gm, inputs, options)) is not None:
        _tell(
            "kernels",
            f"no GEMM becomes a kernel here: {reason}. Results are correct, and the speed is "
            "torch.compile's. options={'reference': True} runs what would be fused as plain torch "
            "ops, without this warning",
        )


def after_matching(gm: GraphModule, record: "Record") -> None:
    """Warn if a pattern of the user's occurs nowhere in the first graph with a product."""
    options, names = record.options, {why.what for why in record.report.refusals}
    if record.dry or not options.patterns or options.numerics == "eager" or not _has_product(gm):
        return
    targets = {node.target for body in bodies(gm.graph) for node in body.graph.nodes}
    for pattern in loading.load(options.patterns, strict=False):
        if pattern.name not in {*loading.builtin_names(), *options.disable, *names}:
            text = f"pattern {pattern.name} was found nowhere in {_graph(record)}: compare its "
            text += "idioms with the model's code (python -m coda_inductor check runs them alone)"
            logged.update([pattern.name] * (pattern.op in targets))
            _tell(pattern.name, text)


def after_fusing(record: "Record") -> None:
    """Warn if no GEMM of this or any earlier graph is fused, if the option ``memory`` had nothing
    to limit, and of disabled names that stopped nothing."""
    sites, options = record.report.sites, record.options
    if any(site.fused for site in sites) or options.gate == "never":
        logged.add("fused")
    elif sites and not record.dry:
        text = f"none of the {len(sites)} GEMMs of {_graph(record)} is fused, {main_reason(sites)}"
        _tell("fused", f"{text}. print(coda_inductor.reports()[-1].table()) has all")
    if record.limit is not None:
        logged.add("memory")
    elif options.memory is not None:
        text = f"option 'memory' has no effect on {_graph(record)}, which has no gradients"
        peak = " on a GPU: a number from 0 to 1 works everywhere"
        _tell("memory", text if isinstance(options.memory, float) else text + peak)
    logged.update(f"disable {name}" for name in record.stopped)
    for name in options.disable if sites and not record.dry else ():
        text = f"option 'disable' has no effect on {_graph(record)}: "
        gemm = f"it fuses no GEMM of a module {name.removeprefix(GEMM)!r}"
        text += gemm if name.startswith(GEMM) else f"nothing in it is called {name!r}"
        if name.removesuffix("_backward") not in record.stopped:  # else there is no gradient of it
            _tell(f"disable {name}", text)


def no_kernels(gm: GraphModule, inputs: Sequence[Any], options: Options) -> Refusal | None:
    """The reason why no product in ``gm`` can become a kernel. None if one may, if there is no
    product, or if the options exclude kernels."""
    if options.reference or options.gate == "never" or not _has_product(gm):
        return None
    if (why := QUACK.missing()) is not None:
        return why
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    gpu = next((d for d in devices if d.type == "cuda"), None)
    if gpu is None:
        text = "the model is not on a GPU, but this machine has one: model.cuda()"
        return refuse("no-kernels-on-device", text)
    model = gpu_of(gpu)
    known = options.gate == "always" or options.measures or not measurements_of(model).empty
    return None if known else unmeasured(model)


def cut_by_ddp(gm: GraphModule) -> bool:
    """Is ``gm`` a part of the graph that Dynamo captured? Torch's DDPOptimizer marks each part; a
    graph that fits into one bucket is passed on unchanged and without a mark."""
    why = getattr(gm, "compile_subgraph_reason", None)
    return "DDPOptimizer" in str(getattr(why, "reason", ""))


def _has_product(gm: GraphModule) -> bool:
    calls = (node for body in bodies(gm.graph) for node in body.graph.nodes)
    names = (str(getattr(n.target, "__name__", n.target)) for n in calls)
    return any(name.split(".")[0] in _PRODUCTS for name in names)  # mm, and aten's mm.default


def _graph(record: "Record") -> str:
    return "the graph" if record.name == "graph" else record.name


def _tell(topic: str, text: str) -> None:
    if topic not in logged:
        logged.add(topic)
        logger.warning("%s", text)
