# SPDX-License-Identifier: Apache-2.0
"""Leave out as few of our passes as possible if the rewritten graph does not compile.

Compilers have bugs, and our passes write graphs that users do not write. :func:`compiled` tries, in
order:

1. all passes. This nearly always succeeds;
2. without the passes that changed something. If that compiles, halves of them are added: a half
   that compiles stays, another one is halved again. Single passes that do not compile are named in
   a warning, with all of the error's text;
3. else no pass at all: the graph that the user wrote.

The result of this search holds for the graph in this process, also when torch compiles it again,
for example for other sizes. A pass that is left out is one more name in ``options["disable"]``, so
that the keys of torch's caches contain it.

The error may come from anything behind the passes: from AOTAutograd, which finds wrong shapes and
dtypes, from Inductor or Triton, or from a lack of memory. In a search, backward graphs are compiled
together with their forward graphs. In the first attempt torch compiles them at the first backward
call, where it knows whether the graph is retained: compiled ahead, they would donate tensors after
their last use, and ``backward(retain_graph=True)`` would raise. A backward graph that fails there
runs op by op, because it is too late for another forward graph.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from coda_inductor import report
from coda_inductor.compat import (
    RestartAnalysis,
    SkipFrame,
    TracingContext,
    backward_at_once,
    counters,
)
from coda_inductor.errors import CodaError, FallbackError
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.read import op_name
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.log import logger, warn_once
from coda_inductor.options import Options
from coda_inductor.record import Record
from coda_inductor.refusal import refuse

#: A pass that cannot be left out on one rank alone: the others would wait in its collectives. If it
#: changed the graph, there is no search: the backend runs op by op, else the error is the user's.
HELD = {"collectives"}
#: A graph and options -> passes that are left out, with reasons; None if all of them are.
_left_out: dict[tuple[str, str], dict[str, str] | None] = {}
_MOST = 256
_Notes = tuple[list[report.GraphReport], Counter[str], dict[str, Any]]


@dataclass
class Result:
    """The result of one attempt.

    Attributes:
        call: the compiled graph.
        record: the record of the passes; None if they did not run.
        whole: did Inductor compile all parts, so that none runs op by op?
    """

    call: Any
    record: Record | None = None
    whole: bool = True


#: Compiles the graph without these passes, or for None without any of ours. It adds the names of
#: passes that changed something to the second argument, also if it raises.
Attempt = Callable[["tuple[str, ...] | None", dict[str, None]], Result]


def compiled(gm: GraphModule, options: Options, name: str, attempt: Attempt) -> Any:
    """Compile Dynamo's graph ``gm``, the same at the start of each attempt. Returns the function.

    Raises:
        FallbackError: with ``strict``, if the first attempt fails.
        Exception: of Inductor or AOTAutograd, about the graph that the user wrote.
    """
    return _Search(gm, options, name, attempt).run()


def cause(error: BaseException) -> str:
    """The whole text: the last line of an InductorError may be a line of the user's program."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {inner}".strip()


def halve(
    names: Sequence[str],
    fails: Callable[[Sequence[str]], str],
    out: dict[str, str],
    error: str = "",
) -> str:
    """Find the ``names`` that fail and add them to ``out``, with their errors. ``fails(part)``
    returns the error with the names ``part``; if it is empty, all later calls include that part.
    Returns the error with all names, which is ``error`` if the caller knows it."""
    error = error or fails(names)
    if error and len(names) == 1:
        out[names[0]] = error
    elif error:
        half = len(names) // 2
        # If the first half does not fail, the second one does.
        first = halve(names[:half], fails, out)
        halve(names[half:], fails, out, "" if first else error)
    return error


class _Search:
    """The search for the passes that one graph does not compile with.

    Attributes:
        changed: passes that changed something, in order. All others run.
        good: passes in the best result.
        out: passes that are left out, with reasons.
        best: the result with the most passes, and its notes.
        lasting: does the result hold for later processes? Not if an attempt ran out of memory.
    """

    def __init__(self, gm: GraphModule, options: Options, name: str, attempt: Attempt):
        self.start, self.attempt = _Start(gm), attempt
        self.options, self.name = options, name
        self.changed: dict[str, None] = {}
        self.good: set[str] = set()
        self.out: dict[str, str] = {}
        self.best = Result(None), self.start.notes()
        self.lasting = True

    def run(self) -> Any:
        key = self.start.digest, self.options.identity
        previous = _left_out.get(key, {})
        self.out, error = dict(previous or {}), ""
        if previous is None or (error := self._error((), first=True)):
            partial = self._fall(error)
            if self.lasting and self.best[0].whole:
                if len(_left_out) >= _MOST:
                    _left_out.clear()
                _left_out[key] = self.out if partial else None
        result, notes = self.best
        self.start.note(notes)
        for name, text in self.out.items():
            why = refuse("defect", f"what it wrote does not compile: {text}", failure=True)
            if result.record is not None:
                result.record.refuse("pass", name, why)
            warn_once(f"{self.name}: the pass {name}", why.text, to="the graph without it")
        return result.call

    def _fall(self, error: str) -> bool:
        """Compile with as many passes as possible. Returns False if even the graph without the
        passes that changed something, which is nearly the user's graph, does not compile."""
        if error and self.changed and not self._error(()):
            halve([n for n in self.changed if n not in self.good], self._error, self.out, error)
            while rest := [n for n in self.changed if n not in self.good | self.out.keys()]:
                halve(rest, self._error, self.out)
            return True
        self.out = {}
        self._try(None, {})
        if error and self.best[0].whole:
            warn_once(self.name, f"with our passes it does not compile: {error}")
        return False

    def _error(self, names: Sequence[str], *, first: bool = False) -> str:
        """The error of a compilation with the good passes and ``names``; empty if it succeeds. A
        pass that changes something for the first time is left out for now: the error may be about
        it."""
        while True:
            active, changes = self.good.union(names), dict[str, None]()
            out = [name for name in self.changed if name not in active]
            try:
                self._try((*self.out, *(name for name in out if name not in self.out)), changes)
            except (CodaError, RestartAnalysis, SkipFrame):
                raise  # for users, and for Dynamo
            except Exception as error:
                text = cause(error)
                if self.options.strict:
                    raise FallbackError(f"{self.name} does not compile: {text}") from error
                logger.debug("%s does not compile", self.name, exc_info=True)
                if HELD & changes.keys():
                    raise
                inner = getattr(error, "inner_exception", error)
                self.lasting &= not isinstance(inner, (torch.OutOfMemoryError, MemoryError))
                fresh = changes.keys() - self.changed.keys()
                self.changed.update(changes)
                if first or not fresh:
                    return text
            else:
                self.changed.update(changes)
                self.good |= {*active, *changes}
                return ""

    def _try(self, out: tuple[str, ...] | None, changed: dict[str, None]) -> None:
        lazy = self.start.first
        self.start.reset()
        with contextlib.nullcontext() if lazy else backward_at_once():
            result = self.attempt(out, changed)
        self.best = result, self.start.notes()


def _signature(node: Node) -> str:
    """What a graph that is compiled again has in common with the first: its ops, and the names,
    dtypes and sizes of its parameters."""
    value = fake(node)
    if isinstance(value, torch.nn.Parameter):
        return f"{node.target} {value.dtype} {tuple(value.shape)}"
    return op_name(node)


class _Start:
    """The state before the first attempt: graphs, torch's notes, ours. Attempts change it."""

    def __init__(self, gm: GraphModule):
        graphs = [module for module in gm.modules() if isinstance(module, GraphModule)]
        self.graphs = [(g, snapshot(g.graph), dict(g.named_children())) for g in graphs]
        self.context = TracingContext.try_get()
        self.before, self.first = self.notes(), True
        nodes = [n for _, graph, _ in self.graphs for n in graph.nodes]
        text = " ".join(filter(None, map(_signature, nodes)))
        #: The same for a graph that is compiled again, also for other or for symbolic sizes.
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def reset(self) -> None:
        """Restore the saved state, unless this is the first attempt."""
        if not self.first:
            gc.collect()  # what the traceback of the last error kept
            for module, graph, children in self.graphs:
                for name in dict(module.named_children()).keys() - children.keys():
                    delattr(module, name)
                for name, child in children.items():
                    setattr(module, name, child)
                restore(module.graph, graph)
                module.recompile()
            self.note(self.before)
        self.first = False

    def notes(self) -> _Notes:
        """The current reports, counters, and torch's context, which Dynamo reads afterwards."""
        torchs = {} if self.context is None else dict(vars(self.context))
        return report.reports(), Counter(counters["coda"]), torchs

    def note(self, notes: _Notes) -> None:
        """Restore ``notes``."""
        report.replace(notes[0])
        counters["coda"].clear()
        counters["coda"].update(notes[1])
        if self.context is not None:
            vars(self.context).update(notes[2])
