# SPDX-License-Identifier: Apache-2.0
"""Which implementation of attention a graph calls: torch chose it when the graph was traced, by
its own order for the device, dtype and shape.

Attention in plain ops, which SDPA's math kernel is by then, is found by what it computes: a product
of batches whose left operand is a softmax of another product of batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from coda_inductor.graph.nodes import aten, elementwise, fake, sources
from coda_inductor.graph.sides import Scope

#: Part of an op's name -> what people call it; the first that matches.
_IMPLEMENTATIONS = {
    "flex_attention": "FlexAttention",
    "cudnn_attention": "cuDNN",
    "flash_attention": "FlashAttention",
    "efficient_attention": "memory-efficient",
    "fused_attention": "the device's own",
    "scaled_dot_product": "SDPA",
}
#: Attention in plain ops: SDPA's, and that which the model itself spells.
MATH, WRITTEN_OUT = "plain ops (SDPA's math kernel)", "plain ops (written out)"

#: Products of batches -> the place of their left operand.
_PRODUCTS = {aten.bmm.default: 0, aten.baddbmm.default: 1}
_MOVES = (
    aten.permute.default, aten.transpose.int, aten.expand.default, aten.clone.default,
    aten.slice.Tensor,
)  # fmt: skip


@dataclass(frozen=True)
class Plain:
    """Attention in plain ops: ``scores`` (batch and heads, queries, keys) is the product of queries
    and keys, ``result`` that of their ``softmax`` and the values."""

    scores: Node
    softmax: Node
    result: Node

    @property
    def name(self) -> str:
        """:data:`MATH` or :data:`WRITTEN_OUT`: SDPA's softmax, which knows rows that see nothing,
        is an op of its own, and no function of the user's."""
        safe = "_safe_softmax" in str(self.softmax.meta.get("original_aten"))
        return MATH if safe else WRITTEN_OUT


def implementation(node: Node) -> str | None:
    """``"cuDNN"``, say, of a call of attention, forward or backward; None of any other node."""
    if node.op != "call_function":
        return None
    name = str(node.target)
    return next((text for part, text in _IMPLEMENTATIONS.items() if part in name), None)


def calls(graph: Graph) -> Counter[str]:
    """How often each implementation is called in the forward pass, plain ops included."""
    forward = (node for node in graph.nodes if "backward" not in str(node.target))
    found = Counter(text for node in forward if (text := implementation(node)) is not None)
    return found + Counter(each.name for each in in_plain_ops(graph))


def in_plain_ops(graph: Graph) -> list[Plain]:
    """Attention of the forward pass that no kernel of attention computes, in the graph's order."""
    products = [node for node in graph.nodes if node.target in _PRODUCTS]
    if len(products) < 2:
        return []
    forward = Scope(graph).forward
    found: dict[Node, Plain] = {}
    for result in products:
        softmax = next(filter(_is_softmax, _behind(_left(result))), None)
        if result not in forward or softmax is None or softmax in found:
            continue
        scores = next((n for n in _behind(softmax.args[0]) if n.target in _PRODUCTS), None)
        if scores is not None:
            found[softmax] = Plain(scores, softmax, result)
    return list(found.values())


def _left(product: Node) -> Node:
    return product.args[_PRODUCTS[product.target]]


def _behind(node: Node) -> Iterator[Node]:
    return sources(node, lambda n: elementwise(n) or n.target in _MOVES)


def _is_softmax(node: Node) -> bool:
    """Is it the exponentials of a row over their sum? They are summed over the last dimension."""
    if node.target is not aten.div.Tensor:
        return False
    top, total = node.args
    if not isinstance(top, Node) or top.target is not aten.exp.default:
        return False
    if not isinstance(total, Node) or total.target is not aten.sum.dim_IntList:
        return False
    return total.args[0] is top and list(total.args[1]) in ([-1], [fake(top).dim() - 1])
