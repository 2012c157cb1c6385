# SPDX-License-Identifier: Apache-2.0
"""Let recorded values of views share memory like the views, because torch reads from them which
memory it may overwrite."""

from __future__ import annotations

from torch.fx import Graph

from coda_inductor.graph.layout import refresh
from coda_inductor.record import Record


def refresh_views(graph: Graph, _record: Record) -> None:
    """Let the recorded value of every view share memory with its present base's value.

    After a node is replaced, its views still share memory with the old node's value: if an output
    is a view of a saved tensor, the two would look independent.
    """
    for node in graph.nodes:
        refresh(node)
