# SPDX-License-Identifier: Apache-2.0
"""Remove nodes without effect that would hide idioms.

Inductor removes full slices and clones too, but after our hook. A product that is transposed twice
(autograd's weight gradient) is read directly, so that later ops, above all the cast to a float32
weight's dtype, can run on the tile."""

from torch.fx import Graph

from coda_inductor.compat import remove_noop_ops
from coda_inductor.graph.edit import replace
from coda_inductor.graph.gemms import TRACED
from coda_inductor.graph.nodes import aten, is_transpose
from coda_inductor.graph.walk import chain
from coda_inductor.log import logger
from coda_inductor.record import Record


def remove_noops(graph: Graph, _record: Record) -> None:
    """Apply Inductor's own pass, and remove double transposes, in place."""
    try:
        remove_noop_ops(graph)
    except Exception:  # a private helper of Inductor's: only fusions are lost
        logger.debug("remove_noop_ops failed", exc_info=True)
    for back in graph.find_nodes(op="call_function", target=aten.permute.default):
        _, *turns = chain(back, is_transpose)
        if len(turns) > 1 and turns[1].target in TRACED:
            replace(back, turns[1])
