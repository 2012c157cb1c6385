# SPDX-License-Identifier: Apache-2.0
"""Each row is multiplied by the B of its group: a mixture's experts.

A program with an operand "groups" multiplies rows groups[e] to groups[e + 1] of A by B[e]; only the
GPU has these numbers. With an "index", row i of A is row index[i] of a smaller matrix, which the
kernel gathers while it loads. Both are QuACK's (``cu_seqlens_m``, ``A_idx``). Two interleaved B's
and two terms of one sum are read as in ``pair`` and ``join``: the distance of gate and up is the
same for each expert. Tiles may be loaded with rows of the next group, which are not stored.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coda_inductor.mainloop.readings.join import Join
from coda_inductor.mainloop.readings.pair import Pair
from coda_inductor.mainloop.readings.plain import Factors, Factory, Plain, Read, Tensors, Why
from coda_inductor.mainloop.tensors import readable, tma_matrix
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.grouped import grouped_product


class Grouped(Plain):
    """Reads A (M, K), or gathers its rows from (R, K), and reads B (E, K, N) of either major."""

    def fits(self, program: EpilogueProgram, terms: int) -> bool:
        return program.grouped and super().fits(program, terms)

    def refuses(self, site: Any) -> Why:
        if "experts" not in site.arch.features:
            return "kernel-form", f"{site.arch.name} has no kernels for rows of experts"
        if site.a_major != "k":
            return "kernel-form", "rows of experts must be contiguous"
        return super().refuses(site)

    def suits(self, program: EpilogueProgram, config: Any) -> bool:
        if program.routes[1] is not None and (config.cluster_n > 1 or config.dynamic):
            return False  # the threads of one CTA gather rows, before a tile is assigned
        return super().suits(program, config)

    def kind(self, program: EpilogueProgram) -> str:
        return "experts"

    def left(self, a: Tensor) -> Tensor:
        return tma_matrix(a)

    def in_place(self, as_: Tensors, bs: Tensors) -> Read | None:
        fits = readable(as_[0]) and all(readable(b, either_major=True) for b in bs)
        return self.reads(as_, bs) if fits else None

    def unfused(self, program: EpilogueProgram, as_: Tensors, bs: Tensors) -> Factors:
        """The factors with one weight per product: the B's of a pair are parts of its columns, the
        B's of terms parts of its rows."""
        if len(bs) == 1:
            return as_, bs
        columns = program.paired
        if bs[0].stride(2) != 1:
            return as_, [torch.cat([b.mT for b in bs], 1 if columns else 2).mT]
        return as_, [torch.cat([*bs], 2 if columns else 1)]

    def plain(
        self, program: EpilogueProgram, as_: Tensors, bs: Tensors, operands: Tensors
    ) -> Callable[[], list[Tensor]]:
        as_, (b,) = self.unfused(program, as_, bs)
        by_kind = {o.kind: x for o, x in zip(program.operands, operands, strict=True)}
        groups, index, a = by_kind["groups"], by_kind.get("index"), torch.cat([*as_], 1)
        a = a if index is None else a[index]
        return lambda: [grouped_product(a, b, groups, None, a.dtype)]


class GroupedPair(Grouped, Pair):
    """Grouped products with two B's, each (E, K, N) and K-major."""


class GroupedAlternating(GroupedPair):
    """A pair of B's, interleaved in one tensor (E, K, 2N) of either major."""

    variants, distances = ("",), ()
    bind, reads = Grouped.bind, Grouped.reads

    def fits(self, program: EpilogueProgram, terms: int) -> bool:
        return program.alternating

    def refuses(self, site: Any) -> Why:
        return super().refuses(dataclasses.replace(site, b_major="k"))

    def mixins(self, program: EpilogueProgram, variant: str) -> tuple[type, ...]:
        return ()

    def inputs(self, site: Any, factory: Factory) -> Factors:
        as_, bs = super().inputs(site, factory)
        return as_, [*self.unfused(site.program, as_, bs)[1]]


class GroupedJoin(Grouped, Join):
    """A sum of two grouped terms, each (M, f) times (E, f, N), with A's rows in place."""

    in_place = Join.in_place
