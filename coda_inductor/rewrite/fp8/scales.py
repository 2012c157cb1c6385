# SPDX-License-Identifier: Apache-2.0
"""The scales of a tensor: its maxima, and the small computation on them.

If a GEMM's epilogue computes a tensor, a maximum over its rows or columns is a reduction there
(rule R2): plain ``abs`` and ``amax`` nodes, which the fuser absorbs. Any other tensor is read once
for all its maxima. A tensor's own maximum is that of its rows' or its columns' maxima.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch.fx import Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.sides import EARLY
from coda_inductor.graph.splice import splice
from coda_inductor.semantic.fp8 import KIND, scale_of
from coda_inductor.semantic.fp8_casts import AMAX

Kind = tuple[int, ...]
ROW: Kind = (1,)
COLUMN: Kind = (0,)
ALL: Kind = ()


@dataclass(frozen=True)
class Source:
    """What is quantized: ``x``, or, after a deferred norm, ``read * factor * weight`` with
    ``x = read * weight``.

    Attributes:
        x: (M, K), the tensor for the maxima of rows.
        read: (M, K), what is in memory.
        factor: None, or (M, 1), positive.
        weight: None, or (1, K).
        others: (reader, what it reads) for other readers of the norm's result.
    """

    x: Node
    read: Node
    factor: Node | None = None
    weight: Node | None = None
    others: Sequence[tuple[Node, Node]] = ()


def scales(
    put: Put, nodes: list[Node], source: Source, *, in_epilogue: bool, early: bool
) -> dict[Node, Node]:
    """The scale of each of ``nodes``, quantizations of ``source``: float32, (M, 1), (1, K) or
    0-dim, where ``put`` puts. ``in_epilogue``: a GEMM's epilogue computes the source;
    ``early``: the forward pass has it."""
    given = {node: arguments(node) for node in nodes}
    kinds = {tuple(how["dims"]) for how in given.values()}
    maxima = _maxima(put, source, kinds, in_epilogue=in_epilogue)
    made: dict[str, Node] = {}
    found: dict[Node, Node] = {}
    for node, how in given.items():
        x, dims, kind = how["x"], how["dims"], [how[name] for name in KIND]
        if (key := str((dims, kind))) not in made:
            amax = maxima[tuple(dims)]
            if how["divides"]:  # in the dtype of x, as its definition says
                amax = put.cast(amax, fake(x).dtype)
            made[key] = splice(put.before, scale_of, [amax, *kind], like=put.like)
            if early:
                made[key].meta[EARLY] = True
        found[node] = made[key]
    return found


def _maxima(
    put: Put, source: Source, kinds: Collection[Kind], *, in_epilogue: bool
) -> dict[Kind, Node]:
    wanted = {ROW: ROW in kinds or COLUMN not in kinds, COLUMN: COLUMN in kinds}
    found: dict[Kind, Node] = {}
    if in_epilogue:
        magnitude = put(aten.abs.default, source.x)
        for kind in (ROW, COLUMN):
            if wanted[kind] and (kind == ROW or source.factor is None):
                found[kind] = put(aten.amax.default, magnitude, list(kind), True)
        if source.factor is not None and ROW in found:
            found[ROW] = put.mul(found[ROW], source.factor)
    missing = [kind for kind in wanted if wanted[kind] and kind not in found]
    if missing:
        alone = missing == [COLUMN]  # a weight is a factor of maxima of columns
        x = source.read if alone else source.x
        parts = put(AMAX, x, source.factor, ROW in missing, COLUMN in missing)
        for kind in missing:
            part = put(operator.getitem, parts, 1 - kind[0])
            found[kind] = put(aten.amax.default, part, list(kind), True)
        if alone and source.weight is not None:
            size = put(aten.abs.default, source.weight)
            found[COLUMN] = put.mul(found[COLUMN], size)
    if ALL in kinds:
        found[ALL] = put(aten.amax.default, next(iter(found.values())))
    return found
