# SPDX-License-Identifier: Apache-2.0
"""Losses that read some of the rows of an LM head's logits: all but each sequence's last one, where
the next token is predicted.

Before (L (B, T, V), of which the loss reads rows)::

    dlogits = cross_entropy_backward(dloss, L[:, :-1], target, lse, number)
    dL = slice_scatter(zeros, dlogits, 1, 0, -1)

The same, as a gradient of all rows::

    dL = cross_entropy_backward(dloss, L, target', lse', number)

where target' is ``ignore_index`` and lse' infinite for rows that the loss does not read.

Why it is valid: an ignored row has weight 0, and its softmax, exp(logits - inf), is 0 as well. In
float16 it might not be, for logits overflow there: infinity less infinity is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, insert
from coda_inductor.graph.nodes import arguments, aten, fake, is_zeros, renames_or_casts
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, readers, source


@dataclass(frozen=True)
class Kept:
    """``logits`` (..., V), and ``part``, the slice of them that a loss reads."""

    logits: Node
    part: Node

    def widened(self, graph: Graph, put: Put, value: Node, fill: float) -> Node:
        """``value`` (M,), one for each row that is read, with ``fill`` for those that are not."""
        whole, part = (put.sizes(node)[:-1] for node in (arguments(self.part)["input"], self.part))
        how = {"dtype": fake(value).dtype, "device": fake(value).device}
        blank = insert(graph, aten.full.default, (whole, fill), how, like=put.like)
        rows = put.reshape(value, part)
        return put.reshape(put(aten.slice_scatter.default, blank, rows, *_place(self.part)), [-1])

    def rows(self, graph: Graph, put: Put, given: dict[str, Any]) -> dict[str, Any]:
        """Of the arguments of ``cross_entropy_backward`` for the rows that a loss reads, those that
        are others for all rows."""
        blank = {"target": given["ignore_index"], "lse": math.inf}
        if fake(given["dloss"]).dim():
            blank = {"dloss": 0.0, **blank}
        wide = {name: self.widened(graph, put, given[name], fill) for name, fill in blank.items()}
        return {**wide, "logits": self.logits}


def through_dropped_rows(gradient: Node, logits: Node, *, alone: bool) -> tuple[Node, Kept | None]:
    """(dL, what is kept of L) where ``gradient`` is that of ``logits``, rows of L, and of the loss
    ``alone``; else ``gradient`` itself and None."""
    part = _unmoved(logits)
    names, users = readers(gradient, renames_or_casts)
    scattered = users[0] if len(users) == 1 else None
    if not alone or part.target is not aten.slice.Tensor or scattered is None:
        return gradient, None
    whole, columns = arguments(part)["input"], fake(logits).shape[-1]
    if scattered.target is not aten.slice_scatter.default:
        return gradient, None
    into = arguments(scattered)
    kept, rank = Kept(source(whole), part), fake(whole).dim()
    placed = _place(part) == _place(scattered) and _place(part)[3] == 1
    fits = (
        placed
        and into["src"] in names
        and _place(part)[0] % rank != rank - 1
        and same(fake(scattered).shape, fake(whole).shape)
        and all(same(fake(node).shape[-1], columns) for node in (part, kept.logits))
        and is_zeros(into["input"])
        and fake(kept.logits).dtype != torch.float16
    )
    return (scattered, kept) if fits else (gradient, None)


def _unmoved(node: Node) -> Node:
    """What ``node`` is a view, a copy or a widened copy of."""
    return base(node, lambda n: source(n) is not n or n.target is aten.clone.default)


def _place(node: Node) -> tuple[Any, ...]:
    """(dimension, start, end, step) of a slice, or of what writes one."""
    given = arguments(node)
    return given["dim"], given["start"] or 0, given["end"], given["step"]
