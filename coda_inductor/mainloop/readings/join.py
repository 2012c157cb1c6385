# SPDX-License-Identifier: Apache-2.0
"""Two products summed as one GEMM over both K's, read in place by two TMA descriptors.

The gradient through gate and up is ``dh = dG Wg + dU Wu``: four separately allocated matrices, one
sum. It is one product over a K twice as long, if A is [dG, dU] and B is [Wg; Wu]. Nothing is copied
for that, by the trick of ``pair``: a stride may be *the distance between two allocations*. With f
the K of one term::

    A[i, (k, term)]  at  a + term * delta_a + i * lda + k        shape (M, (f, 2))
    B[(k, term), j]  at  b + term * delta_b + k * ldb + j        shape ((f, 2), N)

where a and b are the lower of the two addresses each. The main loop walks K in steps of 64, so f
must be a multiple of that: each step is then in one term. It only sees 2 f / 64 steps.

Strides are unsigned, so each operand starts at its lower allocation. The order of a sum does not
matter if both operands have the same; if not ("crossed"), B is read half of K ahead, cyclically.
That is a second variant of the kernel; the launch determines which one runs. The distances are
launch arguments, so one compiled kernel of each variant serves all matrices. Conditions, checked at
run time: see ``unjoinable``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from coda_inductor.mainloop.readings.plain import Bound, Plain, Read, Tensors
from coda_inductor.mainloop.tensors import DELTA_DIVISOR, UnpairableError, distance
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import HALF

#: One step of the main loop along K, in elements of a 16-bit type.
_STEP = 64
_ORDER = "the order of the sum would depend on the allocator"


class Join(Plain):
    """The sum of two terms, each (M, f) times (f, N) or (E, f, N), of 16 bits. Terms that cannot be
    read in place are concatenated. So are all with ``torch.use_deterministic_algorithms``, because
    in place the sum starts with the term at the lower address, which the allocator chooses."""

    variants = ("straight", "crossed")
    distances = ("join_delta_a", "join_delta_b")
    terms = 2

    def takes(self, program: EpilogueProgram, terms: int) -> bool:
        return terms > 1

    def suits(self, program: EpilogueProgram, config: Any) -> bool:
        # Crossed terms are read half of K apart, which a part of K does not allow.
        return config.split_k == 1

    def kernels(self, as_: Tensors, bs: Tensors) -> list[tuple[str, str, str]]:
        if _deterministic() or unjoinable(as_, bs) is not None:
            return [("k", "n", "")]  # for the results of torch.cat
        return [(*self.majors(as_, bs), variant) for variant in self.variants]

    def bind(self, as_: Tensors, bs: Tensors) -> Bound:
        with contextlib.suppress(UnpairableError):
            return self.reads(as_, bs)(as_, bs)
        return super().bind([torch.cat([*as_], 1)], [torch.cat([*bs], -2)])

    def in_place(self, as_: Tensors, bs: Tensors) -> Read | None:
        return self.reads(as_, bs) if unjoinable(as_, bs) is None else None

    def reads(self, as_: Tensors, bs: Tensors) -> Read:
        if (why := _ORDER if _deterministic() else unjoinable(as_, bs)) is not None:
            raise UnpairableError(why)

        def read(as_, bs):
            if _deterministic():
                raise UnpairableError(_ORDER)
            a, delta_a = distance(as_[0], as_[1], "left operands")
            b, delta_b = distance(bs[0], bs[1], "right operands")
            return as_[a], bs[b], "crossed" if a != b else "straight", (delta_a, delta_b)

        return read

    def mixins(self, program: EpilogueProgram, variant: str) -> tuple[type, ...]:
        return (CrossedTerms if variant == "crossed" else JoinedTerms,)


def unjoinable(as_: Tensors, bs: Tensors) -> str | None:
    """Why the sum of ``as_[j] @ bs[j]`` cannot be one product over both K's that is read in place,
    or None if it can, apart from addresses. Reads only K, N, strides and dtypes: fake tensors
    suffice."""
    if len(as_) != 2:
        return f"{len(as_)} terms: only two are read in place"
    (a0, a1), (b0, b1) = as_, bs
    k, n = b0.shape[-2:]
    rows, unit = a_stride = a0.stride()
    b_stride = b0.stride()
    if b0.shape != b1.shape or a0.shape[1] != a1.shape[1]:
        return "the terms differ in K"
    if a_stride != a1.stride() or b_stride != b1.stride():
        return "the terms differ in strides"
    dtype = a0.dtype
    if dtype not in HALF or a1.dtype != dtype or b0.dtype != dtype or b1.dtype != dtype:
        return "the terms are not all of one 16-bit dtype"
    if k % _STEP:
        return f"K={k} of a term is not a multiple of {_STEP}"
    if unit != 1 or rows % 8 or rows < k:
        return "the left operands are not K-major with 16-byte rows"
    *batches, unit, rows = b_stride
    length = k
    if rows == 1:  # N-major
        unit, rows, length = rows, unit, n
    if unit != 1 or rows < length or any(stride % 8 for stride in (*batches, rows)):
        return "the right operands have no unit stride or no 16-byte rows"
    return None


_deterministic = torch.are_deterministic_algorithms_enabled


class JoinedTerms:  # a mixin for QuACK kernel classes
    """Changes K of A and B to (f, 2), right after they enter the trace with K = f."""

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d=append_batch_if_2d
        )
        mA = _over_both_terms(mA, epilogue_args.join_delta_a)
        mB = _over_both_terms(mB, epilogue_args.join_delta_b)
        return mA, mB, mD, mC, epilogue_args


class CrossedTerms(JoinedTerms):
    """As JoinedTerms, for terms of A and B with opposite orders of addresses."""

    def load_tma(self, pipeline, producer_state, copy_fns, k_tile_cnt, k_tile_start=0):
        copy_a, copy_b, *others = copy_fns

        def copy_other_term(k_tile, smem_idx, **arguments):
            copy_b((k_tile + k_tile_cnt // 2) % k_tile_cnt, smem_idx, **arguments)

        return super().load_tma(  # type: ignore[misc]
            pipeline,
            producer_state,
            [copy_a, copy_other_term, *others],
            k_tile_cnt,
            k_tile_start=k_tile_start,
        )


def _over_both_terms(matrix, delta):
    """(rows, f, ...) -> (rows, (64, f / 64, 2), ...); the main loop steps along K's first mode."""
    import cutlass.cute as cute

    rows, k, *batch = matrix.shape  # rows of groups have no batch
    row_stride, k_stride, *batch_stride = matrix.stride
    delta = cute.assume(delta, divby=DELTA_DIVISOR)
    layout = cute.make_layout(
        (rows, (_STEP, k // _STEP, 2), *batch),
        stride=(row_stride, (k_stride, _STEP * k_stride, delta), *batch_stride),
    )
    return cute.make_tensor(matrix.iterator, layout)
