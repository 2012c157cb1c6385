# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 whose scale is known beforehand: static quantization, FSDP's precomputed scales.

Before, for gate and up (``s`` is an input of the graph: one number)::

    q1 = float8(clamp(float32(x) / s)); q2 = float8(clamp(float32(x) / s))

After::

    q = float8(clamp(float32(x) / s))                                one factor of both products

Why it is valid: they are the same ops of the same tensors. Nothing else is to do: such a cast is
elementwise, so that the epilogue that makes x stores q itself (``fuse.fp8``), and behind a norm it
is part of the kernel that normalizes. On Hopper a paired tile stores 16 bits alone: where its
result is to be stored in FP8, gate's own epilogue reads what up has made, which moves as many bytes
as a pair and a cast behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.nodes import aten, base, fake
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.rewrite.fp8.chains import clamped, converts
from coda_inductor.rewrite.fp8.merge import origin


def known_scale(q: Node) -> tuple[Node, Node] | None:
    """(x, scale) of the cast ``q`` to FP8; None if its scale is no number that the graph is given,
    or what it casts is not clamped to what the dtype holds."""
    limit = torch.finfo(fake(q).dtype).max
    product, bounds = clamped(q.args[0])
    if bounds != (-limit, limit) or product.target not in (aten.div.Tensor, aten.mul.Tensor):
        return None
    wide, scale = product.args
    if not isinstance(wide, Node) or not isinstance(scale, Node) or product.kwargs:
        return None
    given = base(scale)
    single = all(isinstance(size, int) and size == 1 for size in fake(scale).shape)
    if not single or given.op not in ("placeholder", "get_attr"):
        return None
    return (wide.args[0] if converts(wide) else wide), given


def merge_known(graph: Graph, casts: Iterable[Node]) -> None:
    """Let equal ones of ``casts``, which have scales that are known, be one, in place."""
    scope = Scope(graph)
    first: dict[tuple[Any, ...], Node] = {}
    for q in sorted(casts):
        found = known_scale(q)
        assert found is not None, "asked before"
        x, scale = found
        place = q in scope.forward, q in scope.graded, checkpoint(q)
        how = clamped(q.args[0])[0].target, fake(q).dtype, str(fake(q).shape)
        one = first.setdefault((origin(x), scale, how, place), q)
        if one is not q:
            q.replace_all_uses_with(one)
