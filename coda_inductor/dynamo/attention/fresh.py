# SPDX-License-Identifier: Apache-2.0
"""Masks that are filled in place, right after they were made.

Before::

    bias = torch.zeros(T, T)
    bias.masked_fill_(hidden, -inf)         # as the documentation of SDPA writes it
    sdpa(q, k, v, attn_mask=bias)

After::

    bias = torch.zeros(T, T).masked_fill(hidden, -inf)
    sdpa(q, k, v, attn_mask=bias)

Why it is valid: nothing has read the new tensor before it is filled, nor made a view of it, and
all that reads it afterwards is given the filled one. These ops keep shape and dtype in place or
not, and the strides of a contiguous tensor.

Refuses: in-place ops other than ``FILLS``, what is not made by a factory or like a tensor that is
not contiguous, and what does not lead to a mask. Such masks stay, as ``mask-mutated``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from coda_inductor.dynamo.attention.fills import FILLED, op_name
from coda_inductor.matching import Body, bodies, value

FILLS = {"masked_fill_": "masked_fill", "triu_": "triu", "tril_": "tril"}


def fill_out_of_place(module: GraphModule) -> None:
    """Rewrite such fills of Dynamo's graph and its checkpointed regions, in place.

    Recorded values stay as they are: the filled tensor's shares its storage with that of the empty
    one and of later views, so that a later write is still known to change it.
    """
    todo = [(mask, body) for body in bodies(module) for mask in _masks(body)]
    seen = set()
    while todo:
        node, body = todo.pop()
        while node in body.outer and body.around is not None:
            node, body = body.outer[node], body.around
        if node in seen:
            continue
        seen.add(node)
        if _made(node):
            while _fills(fill := min(node.users), node):
                fill.target = FILLS[str(fill.target)]
                node.replace_all_uses_with(fill, lambda user, fill=fill: user is not fill)
                todo.append((fill, body))
                node = fill
        todo += [(source, body) for source in node.all_input_nodes]


def _masks(body: Body) -> list[Node]:
    """The masks of attention calls."""
    calls = (n for n in body.graph.nodes if n.target is F.scaled_dot_product_attention)
    given = ([*call.args[3:4], call.kwargs.get("attn_mask")] for call in calls)
    return [mask for each in given for mask in each if isinstance(mask, Node)]


def _made(node: Node) -> bool:
    """Is ``node`` a new tensor, and contiguous?"""
    if not node.op.startswith("call_") or op_name(node) not in FILLED:
        return False
    known = value(node)
    static = all(isinstance(size, int) for size in known.shape)
    return known.is_contiguous() if static else not op_name(node).endswith("_like")


def _fills(node: Node, made: Node) -> bool:
    """Does ``node`` fill ``made``?"""
    return node.op == "call_method" and node.target in FILLS and node.args[0] is made
