# SPDX-License-Identifier: Apache-2.0
"""Save the tensors that one checkpointed block passes to the next, and small products.

Before::

    call = gemm_epilogue(...)         block 0, to be recomputed
    x = view(getitem(call, 0))        block 0, to be recomputed
    mul(x, x)                         block 1, to be recomputed

After::

    call = gemm_epilogue(...)         computed once; x is saved

Why: torch saves the last node of a checkpointed block, but it cannot save a view or one of several
outputs, and a fused block ends in those. It would then recompute all blocks, one after the other,
before the first gradient, with all activations in memory at once. Without the mark for
recomputation, torch never computes the call twice, but saves its outputs. So it does with products
that are small beside what they read, as LoRA's x A^T: a layer's seven take 3 % of its input.

Leaves alone what a user's policy names, tensors that no later checkpoint reads, larger products.
"""

import operator

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.graph.gemms import DENSE
from coda_inductor.graph.nodes import bytes_of, may_view
from coda_inductor.graph.walk import chain
from coda_inductor.record import Record
from coda_inductor.semantic.dropout import FORWARD

_MARKS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
#: A product reads at least so many times the bytes of its result, if that is saved.
_SMALL = 64


def save_borders(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to a joint graph after rewriting and fusing; only tags change."""
    for node in filter(_recomputed, graph.nodes):
        view = may_view(node) and any(_is_later(user, node) for user in node.users)
        if view or _is_small_product(node):
            *names, base = chain(node, may_view)
            if _recomputed(base):
                # Torch cannot save a tuple, or recompute one of several outputs alone.
                outputs = [user for user in base.users if user.target is operator.getitem]
                base.meta["recompute"] = None if outputs else CheckpointPolicy.MUST_SAVE
                names += outputs
            for name in names:
                name.meta["recompute"] = None


def _is_small_product(node: Node) -> bool:
    product = node.target in (*DENSE, FORWARD) or "gemm_epilogue" in str(node.target)
    may = product and node.meta["recompute"] is not CheckpointPolicy.MUST_RECOMPUTE
    return may and _SMALL * bytes_of(node) <= bytes_of(*node.all_input_nodes)


def _recomputed(node: Node) -> bool:
    return node.meta.get("recompute") in _MARKS


def _is_later(user: Node, node: Node) -> bool:
    reader, writer = user.meta.get("ac_graph_id"), node.meta.get("ac_graph_id")
    return _recomputed(user) and reader is not None and writer is not None and reader > writer
