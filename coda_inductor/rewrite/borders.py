# SPDX-License-Identifier: Apache-2.0
"""Between two checkpointed blocks, what the one hands to the other is saved.

Before::

    call = gemm_epilogue(...)         block 0, to be recomputed
    x = view(getitem(call, 0))        block 0, to be recomputed
    mul(x, x)                         block 1, to be recomputed

After::

    call = gemm_epilogue(...)         computed once; x is saved

Why: torch saves the last node of a checkpointed block, but it cannot save a view or one output of
several, and those are what a fused block ends in. It would then compute all blocks again, one after
the other, before the first gradient: all activations at once in memory. A call that is not to be
recomputed is what torch never computes twice, so that its outputs are saved instead.

Leaves alone what nothing of a later checkpoint reads, and what the user's policy says to save.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.graph.nodes import renames
from coda_inductor.graph.walk import chain
from coda_inductor.record import Record

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def save_borders(graph: Graph, _record: Record) -> None:
    """Apply this to a joint graph that is rewritten and fused; nothing but tags changes."""
    for node in graph.nodes:
        if _renames(node) and _recomputed(node) and any(_is_later(u, node) for u in node.users):
            *views, base = chain(node, _renames)
            for view in views:
                view.meta["recompute"] = None
            if _recomputed(base):
                # Torch refuses to save a tuple, and can recompute none of several outputs alone.
                outputs = [user for user in base.users if user.target is operator.getitem]
                base.meta["recompute"] = None if outputs else CheckpointPolicy.MUST_SAVE
                for output in outputs:
                    output.meta["recompute"] = None


def _renames(node: Node) -> bool:
    return renames(node) or node.target is operator.getitem


def _recomputed(node: Node) -> bool:
    return node.meta.get("recompute") in _AGAIN


def _is_later(user: Node, node: Node) -> bool:
    """Does ``user`` lie in a later checkpoint than ``node``?"""
    theirs, ours = user.meta.get("ac_graph_id"), node.meta.get("ac_graph_id")
    return _recomputed(user) and theirs is not None and ours is not None and theirs > ours
