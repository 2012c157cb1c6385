# SPDX-License-Identifier: Apache-2.0
"""The second argument of every pass: options and plan to read, and notes of all rewrites.

One record belongs to the compilation of one Dynamo graph. A pass reads ``options``, ``plan`` and
``sites`` from it, and notes its refusals and how often each rewrite fired. If a pass fails, the
pipeline restores the record together with the graph.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from coda_inductor.debug import DebugFolder
from coda_inductor.graph.nodes import locate
from coda_inductor.log import logger
from coda_inductor.options import Options
from coda_inductor.refusal import Refusal
from coda_inductor.report import GraphReport

if TYPE_CHECKING:
    from coda_inductor.gpu import Gpu
    from coda_inductor.plan import Plan
    from coda_inductor.sites import Sites

#: Attributes that passes write, besides the report.
_NOTES = ("fired", "stopped", "wrappers", "limit", "failed")


@dataclass
class Record:
    """The record of one compilation, see the module docstring.

    Attributes:
        options: the user's options.
        name: the graph's name in reports and debug folders.
        dry: only report decisions: compile nothing, count nothing, warn of nothing.
        later: only start to compile kernels; ``lowering.lower.settle`` waits for them.
        wraps: does the caller apply ``wrappers`` to the compiled graph?
        device: decide, and measure, as if all tensors were on this CUDA device; "meta" is ``gpu``.
        gpu: decide for this GPU model; None for the model of ``device`` or of the tensors.
        report: the report for users: GEMMs and refusals.
        sites: what is known of each GEMM, under the plan of the graph; the pipeline sets it, and
            again when its first pass on an aten graph has completed the plan.
        folder: the debug folder of the graph.
        fired: how often each rewrite fired, by the name of its counter.
        stopped: names in ``options["disable"]`` that prevented a rewrite.
        changed: passes that changed the graph, in order, without those that are needed.
        wrappers: functions from the compiled graph to what is called instead, innermost first.
        room: the bytes that the option ``memory`` leaves a step if it is a peak, or None.
        limit: the ``memory.limit.Limit`` of the joint graph that is compiled now, or None.
        inputs: how many inputs Dynamo's graph has.
        updates: the positions of those that an optimizer updates in the backward pass.
        writes_inputs: does Dynamo's graph write to an input or a buffer?
        failed: did an error occur that the next process may not have (a compiler was killed, a disk
            was full)? Then the result must not be kept in torch's cache.
        rewritten: have the passes on the aten graph run? False if torch took it from its cache.
    """

    options: Options
    name: str = "graph"
    dry: bool = False
    device: torch.device | None = None
    gpu: "Gpu | None" = None
    later: bool = False
    wraps: bool = True
    report: GraphReport = field(init=False)
    folder: DebugFolder = field(init=False)
    sites: "Sites" = field(init=False)
    fired: Counter[str] = field(default_factory=Counter)
    stopped: set[str] = field(default_factory=set)
    changed: dict[str, None] = field(default_factory=dict)
    wrappers: list[Callable[..., Any]] = field(default_factory=list)
    room: int | None = None
    limit: Any = None
    inputs: int = 0
    updates: tuple[int, ...] = ()
    writes_inputs: bool = False
    failed: bool = False
    rewritten: bool = False

    def __post_init__(self) -> None:
        self.report = GraphReport(self.name)
        debug = self.options.debug and not self.dry
        self.folder = DebugFolder(self.name, self.options.debug_dir if debug else None)
        self.report.folder = self.folder.path

    @property
    def plan(self) -> "Plan":
        """The decisions about the GEMMs of the graph together."""
        return self.sites.plan

    def enabled(self, name: str) -> bool:
        """Is ``name``, a pass, a pattern or a counter, enabled? Call it only where a rewrite would
        fire, because a disabled name that is never looked up is reported as without effect."""
        if name in self.options.disable:
            self.stopped.add(name)
        return name not in self.stopped

    def fire(self, name: str, times: int = 1) -> None:
        """Count that a rewrite fired."""
        if times:
            self.fired[name] += times

    def refuse(self, what: str, where: Node | str, why: Refusal) -> None:
        """Note that ``what`` at ``where``, a node or a name, stays as it is."""
        place = where if isinstance(where, str) else locate(where)
        logger.debug("%s at %s refused: %s", what, place, why.text)
        self.report.refusals.append(why.at(what, place))

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A context that forgets its notes if an exception leaves it."""
        sites, refusals = list(self.report.sites), list(self.report.refusals)
        notes = {name: copy(vars(self)[name]) for name in _NOTES}
        try:
            yield
        except BaseException:
            self.report.sites[:], self.report.refusals[:] = sites, refusals
            vars(self).update(notes)
            raise
