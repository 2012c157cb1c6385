# SPDX-License-Identifier: Apache-2.0
"""The scales of a tensor: its maxima, and the little that is computed of them.

A maximum over rows or columns of a tensor that a GEMM's epilogue makes is a reduction there (rule
R2): plain ``abs`` and ``amax`` nodes, which the fuser absorbs. Any other tensor is read once for
all its maxima. A tensor's own maximum is that of its rows' or its columns'.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import aten
from coda_inductor.graph.sides import EARLY
from coda_inductor.graph.splice import splice
from coda_inductor.runtime.fp8_casts import AMAX
from coda_inductor.semantic.fp8 import scale_of

#: In the meta of the node of which an epilogue should make the maxima.
MAXIMA = "coda_maxima"

Kind = tuple[int, ...]
ROW: Kind = (1,)
COLUMN: Kind = (0,)
ALL: Kind = ()


@dataclass(frozen=True)
class Source:
    """What is quantized: ``x``, or behind a norm that waits ``read * factor * weight``, with
    ``x = read * weight``.

    Attributes:
        x: (M, K), what the maxima of rows are of.
        read: (M, K), what is in memory.
        factor: None, or (M, 1), positive.
        weight: None, or (1, K).
        in_epilogue: whether a GEMM's epilogue makes x.
        early: whether the forward pass has it.
        dtype: of what is quantized.
    """

    x: Node
    read: Node
    factor: Node | None
    weight: Node | None
    in_epilogue: bool
    early: bool
    dtype: torch.dtype


class Scales:
    """The scales of one source, each made once, at the insertion point of the first."""

    def __init__(self, put: Put, before: Node, source: Source, kinds: Collection[Kind]):
        self.put, self.before, self.source = put, before, source
        with put.graph.inserting_before(before):
            self.maxima = self._maxima(kinds)
        self.made: dict[tuple, Node] = {}

    def __call__(
        self, dims: Kind, dtype: torch.dtype, power_of_two: bool, divides: bool = False
    ) -> Node:
        """(M, 1), (1, K) or 0-dim, float32."""
        key = dims, dtype, power_of_two, divides
        if key not in self.made:
            amax = self.maxima[dims]
            if divides:
                with self.put.graph.inserting_before(self.before):
                    amax = self.put.cast(amax, self.source.dtype)
            arguments = [amax, dtype, power_of_two, divides]
            scale = splice(self.put.graph, self.before, scale_of, arguments, like=self.put.like)
            if self.source.early:
                scale.meta[EARLY] = True
            self.made[key] = scale
        return self.made[key]

    def _maxima(self, kinds: Collection[Kind]) -> dict[Kind, Node]:
        rows = ROW in kinds or COLUMN not in kinds
        found: dict[Kind, Node] = {}
        if self.source.in_epilogue:
            magnitude = self.put(aten.abs.default, self.source.x)
            magnitude.meta[MAXIMA] = True
            if rows:
                found[ROW] = self._scaled(self.put(aten.amax.default, magnitude, [1], True))
            if COLUMN in kinds and self.source.factor is None:
                found[COLUMN] = self.put(aten.amax.default, magnitude, [0], True)
        missing = [kind for kind in (ROW, COLUMN) if kind in (*kinds, *[ROW] * rows)]
        missing = [kind for kind in missing if kind not in found]
        if missing:
            wanted = [kind in missing for kind in (ROW, COLUMN)]
            alone = ROW not in missing  # a weight is a factor of maxima of columns
            x = self.source.read if alone else self.source.x
            parts = self.put(AMAX, x, self.source.factor, *wanted)
            for kind in missing:
                part = self.put(operator.getitem, parts, 1 - kind[0])
                found[kind] = self.put(aten.amax.default, part, list(kind), True)
            if alone and self.source.weight is not None:
                size = self.put(aten.abs.default, self.source.weight)
                found[COLUMN] = self.put.mul(found[COLUMN], size)
        if ALL in kinds:
            found[ALL] = self.put(aten.amax.default, found[ROW if rows else COLUMN])
        return found

    def _scaled(self, amax: Node) -> Node:
        factor = self.source.factor
        return amax if factor is None else self.put.mul(amax, factor)
