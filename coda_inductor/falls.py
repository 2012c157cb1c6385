# SPDX-License-Identifier: Apache-2.0
"""Compile the graph that the user wrote if the one that our passes wrote does not compile.

Compilers have bugs, and our passes write graphs that users do not write. The error may come from
anything behind the passes: from AOTAutograd, which finds wrong shapes and dtypes, from Inductor or
Triton, or from a lack of memory. One warning has all of its text and the passes that changed the
graph. ``python -m coda_inductor bisect`` finds the one to blame.

A graph that failed is compiled without our passes from then on in this process, at all sizes.

Torch compiles a backward graph when it is first called, which is too late for another forward
graph. If it fails there, it runs op by op (``op_by_op.py``).
"""

import gc
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from coda_inductor import report
from coda_inductor.compat import RestartAnalysis, SkipFrame, TracingContext, counters
from coda_inductor.errors import CodaError, FallbackError
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.read import op_name
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.log import logger, warn_once
from coda_inductor.options import Options

#: Passes that cannot be left out: other ranks would wait in merged collectives, and torch has no
#: gradient of frozen FP8. Behind them the backend runs op by op, or the error is the user's.
HELD = {"collectives", "frozen_fp8"}
#: Graphs, each with the options, that did not compile with our passes.
_failed: set[tuple[str, str]] = set()
_MOST = 256


def compiled(
    gm: GraphModule,
    options: Options,
    name: str,
    ours: Callable[[dict[str, None]], Any],
    plain: Callable[[], tuple[Any, bool]],
) -> Any:
    """Compile Dynamo's graph ``gm``. Returns the compiled function.

    ``ours`` compiles it with our passes. It adds the names of passes that change something to its
    argument, also if it raises. ``plain`` compiles it without them. It returns the function, and
    False if a part of it runs op by op.

    Raises:
        FallbackError: with ``strict``, if ``ours`` fails.
        Exception: of ``plain``, about the graph that the user wrote.
    """
    start = _Start(gm)
    key = start.digest, options.identity
    if key in _failed:
        return plain()[0]
    changed: dict[str, None] = {}
    try:
        return ours(changed)
    except Exception as error:
        inner, text = getattr(error, "inner_exception", error), cause(error)
        if isinstance(inner, (CodaError, RestartAnalysis, SkipFrame)):
            raise  # for users, and for Dynamo
        if options.strict:
            raise FallbackError(f"{name} does not compile: {text}") from error
        logger.debug("%s does not compile", name, exc_info=True)
        if HELD & changed.keys():
            raise
        lasting = not isinstance(inner, (torch.OutOfMemoryError, MemoryError))
    start.restore()
    call, whole = plain()
    if whole:  # else the graph that the user wrote does not compile either
        names = f" ({', '.join(changed)})" if changed else ""
        advice = "`python -m coda_inductor bisect` finds the pass to blame"
        warn_once(name, f"with our passes{names} it does not compile; {advice}. {text}")
        if lasting:
            if len(_failed) >= _MOST:
                _failed.clear()
            _failed.add(key)
    return call


def cause(error: BaseException) -> str:
    """The whole text: the last line of an InductorError may be a line of the user's program."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {inner}".strip()


class _Start:
    """The state before our passes: graphs, torch's notes, ours."""

    def __init__(self, gm: GraphModule):
        graphs = [module for module in gm.modules() if isinstance(module, GraphModule)]
        self.graphs = [(g, snapshot(g.graph), dict(g.named_children())) for g in graphs]
        self.context = TracingContext.try_get()
        self.torchs = dict(vars(self.context)) if self.context is not None else {}
        self.reports, self.counts = report.kept(), Counter(counters["coda"])
        nodes = [n for _, graph, _ in self.graphs for n in graph.nodes]
        text = " ".join(filter(None, map(_signature, nodes)))
        #: The same for a graph that is compiled again, also for other or for symbolic sizes.
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def restore(self) -> None:
        """Restore the saved state."""
        gc.collect()  # what the traceback of the error kept
        for module, graph, children in self.graphs:
            for name in dict(module.named_children()).keys() - children.keys():
                delattr(module, name)
            for name, child in children.items():
                setattr(module, name, child)
            restore(module.graph, graph)
            module.recompile()
        report.replace(self.reports)
        counters["coda"].clear()
        counters["coda"].update(self.counts)
        if self.context is not None:
            vars(self.context).update(self.torchs)


def _signature(node: Node) -> str:
    """What a graph that is compiled again has in common with the first: its ops, and the names,
    dtypes and sizes of its parameters."""
    value = fake(node)
    if isinstance(value, torch.nn.Parameter):
        return f"{node.target} {value.dtype} {tuple(value.shape)}"
    return op_name(node)
