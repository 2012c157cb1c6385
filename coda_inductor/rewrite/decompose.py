# SPDX-License-Identifier: Apache-2.0
"""Semantic ops that no rewrite used become aten ops again, which Inductor compiles as without us.

Before::

    y, rstd = coda_inductor.rms_norm(x, weight, eps, dtype)

After::

    pow, mean, add, rsqrt, mul, mul            as the definition of the op says
"""

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import replace_parts
from coda_inductor.graph.gemms import GEMMS
from coda_inductor.graph.splice import splice
from coda_inductor.graph.vocabulary import REDUCTIONS
from coda_inductor.record import Record
from coda_inductor.semantic.define import CROSSING, DEFINITIONS
from coda_inductor.semantic.experts import group_rows


def decompose_most(graph: Graph, _record: Record) -> None:
    """Decompose all but GEMMs, group rows, and what epilogues absorb as a whole."""
    decompose(graph, keep={*REDUCTIONS, *GEMMS, *CROSSING, group_rows})


def decompose_pointwise(graph: Graph) -> None:
    """Decompose elementwise semantic ops, to show which of their parts an epilogue can absorb."""
    decompose(graph, keep=[op for op in DEFINITIONS if torch.Tag.pointwise not in op.tags])


def decompose(
    graph: Graph, _record: Record | None = None, *, keep: Collection[object] = ()
) -> None:
    """Decompose every semantic op but those in ``keep``, in place."""
    while todo := [n for n in graph.nodes if n.target in DEFINITIONS and n.target not in keep]:
        for node in todo:
            definition = DEFINITIONS[node.target]
            counted = not definition.counted_by_rewrite
            meta = {"coda_pattern": (definition.name, node.name)} if counted else None
            result = splice(node, definition.function, node.args, meta=meta)
            if isinstance(result, Node):
                node.replace_all_uses_with(result)
                graph.erase_node(node)
            else:
                replace_parts(node, result)
    graph.eliminate_dead_code()
