# SPDX-License-Identifier: Apache-2.0
"""Semantic ops that no rewrite took become the aten ops that define them: what is left is what
Inductor would have compiled without us.

Before::

    y, rstd = coda_inductor.rms_norm(x, weight, eps, dtype)

After::

    pow, mean, add, rsqrt, mul, mul            as the definition of the op says
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node

from coda_inductor.fuse.elementwise import REDUCTIONS
from coda_inductor.graph.edit import splice
from coda_inductor.record import Record
from coda_inductor.semantic.define import DEFINITIONS, NAMES
from coda_inductor.semantic.norms import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)

#: They count where they are deferred, not where they are left to Inductor.
_NORMS = (rms_norm, rms_norm_backward, layer_norm, layer_norm_backward)


def decompose(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to every semantic op, in place."""
    _decompose(graph, ())


def decompose_most(graph: Graph, _record: Record) -> None:
    """The same, but for reductions that an epilogue may take."""
    _decompose(graph, REDUCTIONS)


def _decompose(graph: Graph, keep: Collection[object]) -> None:
    while todo := [n for n in graph.nodes if n.target in DEFINITIONS and n.target not in keep]:
        for node in todo:
            _decompose_one(graph, node)
    graph.eliminate_dead_code()


def _decompose_one(graph: Graph, node: Node) -> None:
    pattern = NAMES.get(node.target, node.target.__name__.split(".")[0])
    meta = None if node.target in _NORMS else {"coda_pattern": (pattern, node.name)}
    result = splice(graph, node, DEFINITIONS[node.target], node.args, like=node, meta=meta)
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
