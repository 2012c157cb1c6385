# SPDX-License-Identifier: Apache-2.0
"""Nodes without effect that would hide idioms are removed.

Inductor removes full slices and clones too, but after our hook. AOTInductor's programs read sizes
from tensors in the middle of the graph; they are read from an input with the same size instead. A
product that is transposed twice (autograd's weight gradient) is read directly, so that what
follows, above all the cast to a float32 weight's dtype, can run on the tile."""

from __future__ import annotations

from torch import SymInt, Tensor
from torch.fx import Graph

from coda_inductor.compat import remove_noop_ops
from coda_inductor.graph.edit import prune
from coda_inductor.graph.gemms import TRACED
from coda_inductor.graph.nodes import aten, fake, is_transpose
from coda_inductor.graph.read import change
from coda_inductor.graph.sides import is_tangent
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import chain
from coda_inductor.log import logger
from coda_inductor.record import Record


def remove_noops(graph: Graph, _record: Record) -> None:
    """Apply Inductor's own pass, remove double transposes, and read sizes from inputs, in place."""
    try:
        remove_noop_ops(graph)
    except Exception:  # a private helper of Inductor's: only fusions are lost
        logger.debug("remove_noop_ops failed", exc_info=True)
    for back in graph.find_nodes(op="call_function", target=aten.permute.default):
        _, *turns = chain(back, is_transpose)
        if len(turns) > 1 and turns[1].target in TRACED:
            back.replace_all_uses_with(turns[1])
            prune([back])
    _ask_inputs(graph)


def _ask_inputs(graph: Graph) -> None:
    asked = graph.find_nodes(op="call_function", target=aten.sym_size.int)
    if not asked:
        return
    inputs = [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(fake(node), Tensor) and not is_tangent(node)  # the forward pass has none yet
    ]
    known = [
        (node, dim, size)
        for node in inputs
        for dim, size in enumerate(fake(node).shape)
        if isinstance(size, SymInt)
    ]
    for node in asked:
        where = next(((n, dim) for n, dim, size in known if same(size, fake(node))), None)
        if where is not None:
            change(node, input=where[0], dim=where[1])
