# SPDX-License-Identifier: Apache-2.0
"""What a GEMM is in an aten graph: its operands, what sums of them are, which one made a tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from coda_inductor.graph.nodes import ALIASES, aten, elementwise, fake, is_cast
from coda_inductor.graph.sizes import same
from coda_inductor.refusal import Refusal

#: In the meta of a GEMM that may stay unfused without a warning: what it could absorb is no more
#: than a correction of a weight's gradient, whose K is the number of rows and may suit no kernel.
OPTIONAL = "coda_optional"


GEMMS = (aten.mm.default, aten.addmm.default)


def gemm_inputs(node: Node) -> tuple[Node, Node]:
    """(A, B) of an ``mm`` or ``addmm`` node."""
    return (node.args[0], node.args[1]) if node.target is aten.mm.default else node.args[1:3]


#: Nodes that are looked at in search of a GEMM: a chain of elementwise ops may be very long.
_FAR = 256


#: From a GEMM node to the reason why its epilogue cannot or should not be fused, or None.
Legal = Callable[[Node], Refusal | None]


def terms(node: Node) -> list[Node] | None:
    """The products that ``node`` is the sum of; None if it is anything else than a plain sum (or a
    single product) whose parts nobody else reads. ``node`` itself may have any readers."""
    found: list[Node] = []
    todo = [node]
    while todo:
        top = todo.pop()
        if top is not node and len(top.users) != 1:
            return None
        if top.target is aten.mm.default:
            found.append(top)
        elif top.target in ALIASES or (is_cast(top) and fake(top).dtype != torch.float64):
            todo.append(top.args[0])
        elif _is_add(top):
            todo += top.args
        else:
            return None
    return found


def _is_add(node: Node) -> bool:
    """Element by element: a sum that broadcasts adds every row to every row."""
    if node.target is not aten.add.Tensor or node.kwargs or node.args[0] == node.args[1]:
        return False
    tensors = [x for x in map(fake, node.args) if isinstance(x, torch.Tensor)]
    return len(tensors) == 2 and all(same(x.numel(), fake(node).numel()) for x in tensors)


def producer(x: Node) -> Node | None:
    """The last GEMM whose tile ``x`` is elementwise computed from.

    Looks at the last node first: what is left when a GEMM is found is older than it. A residual
    stream leads back through all layers, whichever side of an addition it stands on.
    """
    todo = {x}
    for _ in range(_FAR):
        if not todo:
            break
        node = max(todo)
        todo.remove(node)
        if node.target in GEMMS:
            return node
        if node.op == "call_function" and elementwise(node):
            todo.update(node.all_input_nodes)
    return None


def b_major(b: torch.Tensor) -> str:
    """Which dimension of B (K, N) is contiguous: "n", or "k" for a linear layer's weight."""
    return "n" if b.stride(1) == 1 and b.stride(0) != 1 else "k"
