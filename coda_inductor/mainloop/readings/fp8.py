# SPDX-License-Identifier: Apache-2.0
"""FP8 operands: contiguous along K, one product at a time, with exact or fast accumulation.

Fast accumulation on Hopper is as in ``aten._scaled_mm``: the multiplier, whose accumulator keeps
fewer bits than float32, sums over all of K. Exact, QuACK adds it to float32 registers at each step
of K, which doubles the registers: for 128 x 128, shared by two warpgroups, both fit; larger tiles
spill. In that small tile fast accumulation gains no time, and the exact sum is used (H200: 659,
672, 288 and 206 us, where the best fast tile took 654, 702, 315 and 206). QuACK's kernel class has
an argument for fast accumulation, which none of its functions passes.
"""

from typing import Any

from torch import Tensor

from coda_inductor.arch import arch_with
from coda_inductor.mainloop.readings.pair import Pair
from coda_inductor.mainloop.readings.plain import Majors, Plain, Read, Tensors, Why
from coda_inductor.mainloop.tensors import b_major, tma_matrix
from coda_inductor.program import EpilogueProgram, reference

#: The tile whose float32 sums fit, if two warpgroups share it.
_SMALL = (128, 128)


class Fp8(Plain):
    """Reads A (M, K) and B (K, N), both FP8 and contiguous along K."""

    def fits(self, program: EpilogueProgram, terms: int) -> bool:
        return program.fp8

    def refuses(self, site: Any) -> Why:
        program, terms = site.program, len(site.ks)
        sides = ("left", site.a_major, "M"), ("right", site.b_major, "N")
        for name, major, other in sides:
            if major != "k":
                text = f"its {name} operand is contiguous along {other}: FP8 needs contiguous K"
                return "fp8-layout", text
        if terms > 1:
            text = f"a sum of {terms} FP8 products, each with its own scales"
            return "kernel-form", text
        if "mixed" not in site.arch.features and program.a_dtype != program.b_dtype:
            mixed = f"{program.a_dtype} times {program.b_dtype}"
            return "fp8-mixed", f"{mixed} has no kernel on {site.arch.name}"
        return super().refuses(site)

    def kind(self, program: EpilogueProgram) -> str:
        return "fp8 fast" if program.fast else "fp8"

    def majors(self, as_: Tensors, bs: Tensors) -> Majors:
        return "k", "k"  # other layouts are copied

    def left(self, a: Tensor) -> Tensor:
        return tma_matrix(a)

    def right(self, b: Tensor) -> Tensor:
        return tma_matrix(b.t()).t()

    def in_place(self, as_: Tensors, bs: Tensors) -> Read | None:
        along_k = as_[0].stride(1) == 1 == bs[0].stride(0)
        return super().in_place(as_, bs) if along_k else None

    def mixins(self, program: EpilogueProgram, variant: str) -> tuple[type, ...]:
        fast = (FastAccumulation,) if program.fast else ()
        return (*fast, *super().mixins(program, variant))

    def scale(self, k: int) -> float:
        # FP8 rounds small weights to zeros, which need little power: only the product is scaled.
        return 1.0

    def product(self, program: EpilogueProgram, a: Tensor, b: Tensor) -> Tensor:
        return reference.fp8_product(a, b, program.fast, None, program.product_dtype)


class PairedFp8(Fp8, Pair):
    """Reads one A and two B's in place, all FP8."""

    def fits(self, program: EpilogueProgram, terms: int) -> bool:
        return program.fp8 and program.paired

    def majors(self, as_: Tensors, bs: Tensors) -> Majors:
        return "k", b_major(bs[0])


class FastAccumulation:  # a mixin for QuACK kernel classes
    """Sums over all of K in the multiplier if there are too few registers for both accumulators,
    and if QuACK's class has an argument for that."""

    arch: int

    def __init__(self, acc_dtype, a_dtype, tile, cluster, *, pingpong=False, **others):
        choice = "accumulation" in arch_with(divmod(self.arch, 10)).features
        slow = not choice or (tuple(tile[:2]) == _SMALL and not pingpong)
        fast = {} if slow else {"fp8_fast_accum": True}
        super().__init__(  # type: ignore[call-arg]
            acc_dtype, a_dtype, tile, cluster, pingpong=pingpong, **others, **fast
        )
