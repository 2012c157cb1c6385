# SPDX-License-Identifier: Apache-2.0
"""The passes on the aten graph as the one that Inductor runs: it has a ``uuid``, so that torch's
caches know what its result depends on. It runs twice without harm: Inductor hands it nested regions
more than once."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch.fx import Graph

from coda_inductor import patterns
from coda_inductor.compat import CustomGraphPass
from coda_inductor.pipeline import on_aten
from coda_inductor.record import Record
from coda_inductor.runtime.versions import identity
from coda_inductor.select.policy import crowded
from coda_inductor.select.store import generation


class JointPass(CustomGraphPass):
    """The passes of ``pipeline.ON_ATEN`` on one graph.

    ``before`` is what the user had set as ``joint_custom_pre_pass``: a pass or several; they run
    first.

    Attributes:
        ran: False where torch took the graph from its cache.
    """

    def __init__(self, record: Record, before: Any = None):
        several = isinstance(before, (list, tuple))
        self.before = tuple(before) if several else () if before is None else (before,)
        self.record, self.ran = record, False

    def __call__(self, graph: Graph) -> None:
        self.ran = True
        for theirs in self.before:
            theirs(graph)
        on_aten(graph, self.record)

    def uuid(self) -> Any:
        """Everything that the result depends on; None (never cached) while debugging."""
        options = self.record.options
        if options.debug:
            return None
        inner = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        if None in inner:
            return None
        files = tuple(_digest(path) for path in patterns.files(options.patterns))
        decided = crowded(), generation()
        everything = (_sources(), options.identity, identity(), inner, files, decided)
        return hashlib.sha256(repr(everything).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    root = Path(__file__).parent
    return "".join(_digest(path) for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
