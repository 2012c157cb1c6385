# SPDX-License-Identifier: Apache-2.0
"""What the matcher reads of one node: its op in the common dialect, and its recorded value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from coda_inductor.compat import storage


class Canon(NamedTuple):
    """A node in the common dialect: op name and its significant arguments. ``through``: nodes
    between the node and its arguments that are part of the op."""

    op: str
    args: tuple[Any, ...]
    through: tuple[Node, ...] = ()


def value(node: Any) -> Any:
    """The fake value of a node of Dynamo's graph, under Dynamo's own key, or AOTAutograd's (in
    nested regions); None for anything else. For aten graphs there is ``graph.nodes.fake``."""
    if not isinstance(node, Node):
        return None
    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    return None


def plain(*nodes: Any) -> list[Any] | None:
    """The values of ``nodes``, if all of them are recorded and plain tensors; else None."""
    known = [value(node) for node in nodes]
    return known if all(hasattr(each, "fake_mode") for each in known) else None


def is_view(node: Node, tensor: Any) -> bool:
    """Does ``node``, in any spelling, have exactly the elements of ``tensor``: the same memory,
    sizes and strides?"""
    known = value(node)
    strided = all(isinstance(t, Tensor) and t.layout == torch.strided for t in (known, tensor))
    if not strided or storage(known) != storage(tensor):
        return False
    if known.dtype != tensor.dtype or known.dim() != tensor.dim():
        return False
    sizes = [(*t.shape, *t.stride(), t.storage_offset()) for t in (known, tensor)]
    return all(statically_known_true(a == b) for a, b in zip(*sizes, strict=True))
