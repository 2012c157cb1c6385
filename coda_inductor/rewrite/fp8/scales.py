# SPDX-License-Identifier: Apache-2.0
"""The scales of a tensor: its maxima, and the small computation on them.

If a GEMM's epilogue computes the tensor, a maximum over its rows or columns is a reduction there
(rule R2): plain ``abs`` and ``amax`` nodes, which the fuser absorbs. Any other tensor is read once
for all its maxima. A tensor's own maximum is the maximum of its rows' or its columns' maxima.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments, aten, fake, is_cast
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
    """A tensor to quantize: ``x``, or behind a norm ``read * factor * weight``, x = read * weight.

    Attributes:
        x: the tensor for the maxima of rows, (M, K).
        read: the tensor in memory, (M, K).
        factor: the norm's positive scale, (M, 1), or None.
        weight: the norm's weight, (1, K), or None.
        others: (reader, the node that it reads) for other readers of the norm's result.
    """

    x: Node
    read: Node
    factor: Node | None = None
    weight: Node | None = None
    others: Sequence[tuple[Node, Node]] = ()


def scaled(x: Node) -> Source | None:
    """The source if ``x`` is a matrix in 16 bits times one number a column, so that the cast reads
    the matrix and the product stays on a tile; else None."""
    if x.target is not aten.mul.Tensor:
        return None
    wide, vector = (arguments(x)[name] for name in ("input", "other"))
    if not isinstance(vector, Node) or not is_cast(wide) or fake(wide).shape != fake(x).shape:
        return None
    if fake(x).dim() != 2 or tuple(fake(vector).shape) != (1, fake(x).shape[1]):
        return None
    return Source(x, wide.all_input_nodes[0], None, vector)


def scales(
    put: Put, calls: dict[Node, dict[str, Any]], source: Source, *, in_epilogue: bool, forward: bool
) -> dict[Node, Node]:
    """The scale of each quantization of ``source``, given with their arguments: float32, (M, 1),
    (1, K) or 0-dim. ``put`` inserts the nodes. ``in_epilogue``: a GEMM's epilogue computes the
    source; ``forward``: the forward pass has it."""
    kinds = {tuple(call["dims"]) for call in calls.values()}
    maxima = _maxima(put, source, kinds, in_epilogue=in_epilogue)
    by_key: dict[str, Node] = {}
    result: dict[Node, Node] = {}
    for node, call in calls.items():
        x, dims, kind = call["x"], call["dims"], [call[name] for name in KIND]
        if (key := str((dims, kind))) not in by_key:
            amax = maxima[tuple(dims)]
            if call["divides"]:  # in the dtype of x, as its definition says
                amax = put.cast(amax, fake(x).dtype)
            by_key[key] = splice(put.before, scale_of, [amax, *kind], like=put.like)
            if forward:
                by_key[key].meta[EARLY] = True
        result[node] = by_key[key]
    return result


def _maxima(
    put: Put, source: Source, kinds: Collection[Kind], *, in_epilogue: bool
) -> dict[Kind, Node]:
    needs = {ROW: ROW in kinds or COLUMN not in kinds, COLUMN: COLUMN in kinds}
    maxima: dict[Kind, Node] = {}
    if in_epilogue:
        magnitude = put(aten.abs.default, source.x)
        for kind in (ROW, COLUMN):
            if needs[kind] and (kind == ROW or source.factor is None):
                maxima[kind] = put(aten.amax.default, magnitude, list(kind), True)
        if source.factor is not None and ROW in maxima:
            maxima[ROW] = put.mul(maxima[ROW], source.factor)
    missing = [kind for kind in needs if needs[kind] and kind not in maxima]
    if missing:
        alone = missing == [COLUMN]  # a weight is a factor of maxima of columns
        x = source.read if alone else source.x
        parts = put(AMAX, x, source.factor, ROW in missing, COLUMN in missing)
        for kind in missing:
            part = put(operator.getitem, parts, 1 - kind[0])
            maxima[kind] = put(aten.amax.default, part, list(kind), True)
        if alone and source.weight is not None:
            size = put(aten.abs.default, source.weight)
            maxima[COLUMN] = put.mul(maxima[COLUMN], size)
    if ALL in kinds:
        maxima[ALL] = put(aten.amax.default, next(iter(maxima.values())))
    return maxima
