# SPDX-License-Identifier: Apache-2.0
"""Rows that have a B of their own each, that of their group: a mixture's experts.

A program with an operand "groups" multiplies rows groups[e] to groups[e + 1] of A by B[e]; which
they are only the GPU knows. With an "index", row i of A is row index[i] of a smaller matrix, which
the kernel gathers while it loads: nobody writes the rows beside each other. Source: QuACK's GEMMs
of sequences of several lengths (``cu_seqlens_m``, ``A_idx``).

Two B's that are interleaved, and two terms of one sum, are read as ``pair`` and ``join`` read them:
each expert's gate and up lie as far apart as every other's, be they halves of one parameter or two.
Tiles of an operand may be loaded with rows of the next group: those are not stored.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coda_inductor.mainloop.readings.join import _ORDER, _STEP, Join, _deterministic
from coda_inductor.mainloop.readings.pair import Pair
from coda_inductor.mainloop.readings.plain import Bound, Majors, Plain, Read, Tensors, a_major
from coda_inductor.mainloop.tensors import ALIGN, UnpairableError, distance, readable, tma_matrix
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.grouped import grouped_product

#: The first that fits runs until a site is measured: those were the fastest of most, on an H100.
_CONFIGS = (
    "128x256:1x2:co 128x256:2x1:co 128x192:2x1:pp 128x128:2x1:pp 256x128:1x2:co "
    "256x192:2x1:co 128x208:2x1:pp 128x160:2x1:pp 256x128:2x1:co"
)


class Grouped(Plain):
    """A (M, K), or (R, K) that rows are gathered from, times B (E, K, N) of either major."""

    def takes(self, program: EpilogueProgram, terms: int) -> bool:
        return program.grouped and super().takes(program, terms)

    def refuses(
        self, program: EpilogueProgram, majors: Majors, terms: int, arch: int
    ) -> tuple[str, str] | None:
        if arch != 9:
            return "grouped-arch", "rows of experts have kernels on Hopper only"
        if majors[0] != "k":
            return "grouped-layout", "rows of experts must be contiguous"
        return super().refuses(program, majors, terms, arch)

    def suits(self, program: EpilogueProgram, config: Any) -> bool:
        if program.routes[1] is not None and (config.cluster_n > 1 or config.dynamic):
            return False  # rows are gathered by the threads of one CTA, before a tile is dealt out
        return config.split_k == 1 and super().suits(program, config)

    def configs(self, program: EpilogueProgram) -> str:
        return _CONFIGS

    def majors(self, as_: Tensors, bs: Tensors) -> Majors:
        return a_major(as_[0]), "n" if bs[0].stride(2) == 1 else "k"

    def left(self, a: Tensor) -> Tensor:
        return tma_matrix(a)

    def right(self, b: Tensor) -> Tensor:
        return b if b.data_ptr() % ALIGN == 0 and _readable(b) else b.contiguous()

    def in_place(self, as_: Tensors, bs: Tensors) -> Read | None:
        fits = readable(as_[0]) and all(map(_readable, bs))
        return self.reads(as_, bs) if fits else None

    def dummies(
        self, program: EpilogueProgram, m: int, n: int, k: int, majors: Majors, device: Any
    ) -> tuple[Tensor, Tensor]:
        empty = functools.partial(torch.empty, dtype=getattr(torch, program.a_dtype), device=device)
        columns, e = n * len(program.accs), 2
        b = empty(e, k, columns) if majors[1] == "n" else empty(e, columns, k).mT
        return empty(m, k), b

    def inputs(
        self, site: Any, made: Callable[[str, float], Callable[..., Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        program, a = site.program, made(site.program.a_dtype, 1.0)
        as_ = [a(site.rows or site.m, k) for k in site.ks]
        bs = []
        for k in (k for k in site.ks for _ in program.accs):
            b, e = made(program.b_dtype, self.scale(k)), site.groups
            bs.append(b(e, k, site.n) if site.b_major == "n" else b(e, site.n, k).mT)
        return as_, bs

    def unfused(
        self, program: EpilogueProgram, as_: Tensors, bs: Tensors
    ) -> tuple[Tensors, Tensors]:
        """One weight, of which a pair has parts of the columns, and terms parts of the rows."""
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
    """The same with two B's, each (E, K, N) and K-major."""

    def reads(self, as_: Tensors, bs: Tensors) -> Read:
        b0, b1 = bs
        if b0.shape != b1.shape or b0.stride() != b1.stride() or b0.dtype != b1.dtype:
            raise UnpairableError("the paired weights differ in shape, strides or dtype")
        if b0.stride(1) != 1 or not _readable(b0):
            raise UnpairableError("the paired weights are not K-major with 16-byte rows")
        (e, k, n), (batch, _, row), dtype, device = b0.shape, b0.stride(), b0.dtype, b0.device

        def read(as_, bs):
            swapped, delta = distance(bs[0], bs[1], "paired weights")
            shape, strides = (e, 2 * n, k), (batch, row, 1)
            view = _foreign_view(bs[swapped].data_ptr(), shape, strides, dtype, device)
            return as_[0], view, "swapped" if swapped else "", (delta,)

        return read

    def bind(self, as_: Tensors, bs: Tensors) -> Bound:
        as_ = [self.left(as_[0])]
        return self.reads(as_, bs)(as_, bs)


class GroupedAlternating(GroupedPair):
    """A pair that lies interleaved in one B (E, K, 2N), of either major."""

    variants, distances = ("",), ()
    bind, reads = Grouped.bind, Grouped.reads

    def takes(self, program: EpilogueProgram, terms: int) -> bool:
        return program.alternating

    def refuses(
        self, program: EpilogueProgram, majors: Majors, terms: int, arch: int
    ) -> tuple[str, str] | None:
        return super().refuses(program, (majors[0], "k"), terms, arch)

    def mixins(self, program: EpilogueProgram, variant: str) -> tuple[type, ...]:
        return ()

    def inputs(
        self, site: Any, made: Callable[[str, float], Callable[..., Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        as_, bs = super().inputs(site, made)
        return as_, [*self.unfused(site.program, as_, bs)[1]]


class GroupedJoin(Grouped, Join):
    """The sum of two terms, each (M, f) times (E, f, N), rows in place."""

    def kernels(self, as_: Tensors, bs: Tensors) -> list[tuple[str, str, str]]:
        if _deterministic() or terms_differ(as_, bs) is not None:
            return [("k", "n", "")]  # of what torch.cat makes
        return [(*self.majors(as_, bs), variant) for variant in self.variants]

    def bind(self, as_: Tensors, bs: Tensors) -> Bound:
        with contextlib.suppress(UnpairableError):
            return self.reads(as_, bs)(as_, bs)
        a, b = torch.cat([*as_], 1), torch.cat([*bs], 1)
        return self.left(a), b.contiguous(), "", ()

    def in_place(self, as_: Tensors, bs: Tensors) -> Read | None:
        return None if terms_differ(as_, bs) is not None else self.reads(as_, bs)

    def reads(self, as_: Tensors, bs: Tensors) -> Read:
        if (why := terms_differ(as_, bs)) is not None:
            raise UnpairableError(why)

        def read(as_, bs):
            if _deterministic():
                raise UnpairableError(_ORDER)
            a, delta_a = distance(as_[0], as_[1], "left operands")
            b, delta_b = distance(bs[0], bs[1], "right operands")
            return as_[a], bs[b], "crossed" if a != b else "straight", (delta_a, delta_b)

        return read


def terms_differ(as_: Tensors, bs: Tensors) -> str | None:
    """Why the sum of two products, each (M, f) times (E, f, N), cannot be one, addresses aside, or
    None. Fake tensors will do."""
    if len(as_) != 2:
        return f"{len(as_)} terms: only two are read in place"
    (a0, a1), (b0, b1) = as_, bs
    if a0.stride() != a1.stride() or b0.stride() != b1.stride() or b0.shape != b1.shape:
        return "the terms differ in strides or K"
    if a0.shape[1] % _STEP or not (readable(a0) and _readable(b0)):
        return f"K of a term is not a multiple of {_STEP}, or rows are not of 16 bytes"
    return None


def _readable(b: Tensor) -> bool:
    """Can TMA read ``b`` (E, K, N), whatever its pointer?"""
    return readable(b[0], either_major=True) and b.stride(0) % (ALIGN // b.element_size()) == 0


@functools.lru_cache(maxsize=1024)
def _foreign_view(pointer: int, shape, strides, dtype: torch.dtype, device) -> Tensor:
    """(E, K, N) of device memory that is (E, N, K) there: nothing else of it is touched."""
    memory = types.SimpleNamespace(
        __cuda_array_interface__={
            "shape": shape,
            "strides": tuple(stride * dtype.itemsize for stride in strides),
            "typestr": "<u2",
            "data": (pointer, False),
            "version": 3,
        }
    )
    return torch.as_tensor(memory, device=device).view(dtype).mT
