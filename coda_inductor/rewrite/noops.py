# SPDX-License-Identifier: Apache-2.0
"""Remove nodes without effect that would hide idioms.

Inductor removes full slices and clones too, but after our hook. A product that is transposed twice
(autograd's weight gradient) is read directly, so that later ops, above all the cast to a float32
weight's dtype, can run on the tile. A tensor that is cut into slices and concatenated again (FLUX's
text and image) is read directly for the same reason."""

from torch.fx import Graph, Node

from coda_inductor.compat import remove_noop_ops
from coda_inductor.graph.aliases import WRITTEN
from coda_inductor.graph.edit import replace
from coda_inductor.graph.gemms import TRACED
from coda_inductor.graph.nodes import arguments, aten, fake, is_transpose, may_view
from coda_inductor.graph.sizes import same, same_strides
from coda_inductor.graph.walk import base, chain, leaves
from coda_inductor.log import logger
from coda_inductor.record import Record


def remove_noops(graph: Graph, _record: Record) -> None:
    """Apply Inductor's own pass, and remove double transposes and joined slices, in place."""
    try:
        remove_noop_ops(graph)
    except Exception:  # a private helper of Inductor's: only fusions are lost
        logger.debug("remove_noop_ops failed", exc_info=True)
    for back in graph.find_nodes(op="call_function", target=aten.permute.default):
        _, *turns = chain(back, is_transpose)
        if len(turns) > 1 and turns[1].target in TRACED:
            replace(back, turns[1])
    for joined in graph.find_nodes(op="call_function", target=aten.cat.default):
        if (whole := _whole(joined)) is not None and not leaves(joined):
            replace(joined, whole)


def _whole(joined: Node) -> Node | None:
    """The tensor whose slices, all and in order, ``joined`` concatenates, if it has the same
    strides, which views of ``joined`` may need, and is never written to; else None."""
    args = arguments(joined)
    dim, end, whole = args["dim"] % fake(joined).dim(), 0, None
    for piece in args["tensors"]:
        cut = arguments(piece) if piece.target is aten.slice.Tensor else {}
        if cut.get("step") != 1 or cut["dim"] % fake(joined).dim() != dim:
            return None
        whole, size = cut["input"] if whole is None else whole, fake(cut["input"]).shape[dim]
        start = fake(cut["start"]) or 0
        start = start + size if isinstance(start, int) and start < 0 else start
        if cut["input"] is not whole or not same(start, end):
            return None
        end = end + fake(piece).shape[dim]
    if whole is None or not same(end, fake(whole).shape[dim]):
        return None
    written = base(whole, may_view).meta.get(WRITTEN)  # the copy has the old values
    return whole if same_strides(fake(whole), fake(joined)) and not written else None
