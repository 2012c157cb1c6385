# SPDX-License-Identifier: Apache-2.0
"""Two products summed as one GEMM over both K's, read in place by two TMA descriptors.

The gradient through gate and up is ``dh = dG Wg + dU Wu``, which is one product over a K twice as
long: A is [dG, dU] and B is [Wg; Wu]. As in ``pair``, a stride is *the distance between two
allocations*. With f the K of one term, and a and b each the lower of two addresses::

    A[i, (k, term)]  at  a + term * delta_a + i * lda + k        shape (M, (f, 2))
    B[(k, term), j]  at  b + term * delta_b + k * ldb + j        shape ((f, 2), N)

The main loop walks K in steps of 64, so f must be a multiple of that: each step is in one term.
Where an operand's lower allocation belongs to the second term, its terms change places as they are
loaded: the sum always starts with the first term, so that its bits do not depend on addresses.
Distances and these orders are launch arguments: one compiled kernel serves all matrices.
"""

import contextlib

import torch

from coda_inductor.mainloop.readings.plain import Binding, Plain, Read, Tensors
from coda_inductor.mainloop.tensors import DELTA_DIVISOR, UnpairableError, distance, readable
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import HALF

#: One step of the main loop along K, in elements of a 16-bit type.
_STEP = 64


class Join(Plain):
    """The sum of two terms, each (M, f) times (f, N) or (E, f, N), of 16 bits. Terms that cannot be
    read in place are concatenated."""

    variants = ("joined",)
    distances = ("join_delta_a", "join_delta_b", "join_first_a", "join_first_b")
    terms = 2

    def fits(self, program: EpilogueProgram, terms: int) -> bool:
        return terms > 1

    def kernels(self, as_: Tensors, bs: Tensors) -> list[tuple[str, str, str]]:
        if not joinable(as_, bs):
            return [("k", "n", "")]  # for the results of torch.cat
        return [(*self.majors(as_, bs), variant) for variant in self.variants]

    def bind(self, as_: Tensors, bs: Tensors) -> Binding:
        with contextlib.suppress(UnpairableError):
            return self.reads(as_, bs)(as_, bs)
        return super().bind([torch.cat([*as_], 1)], [torch.cat([*bs], -2)])

    def in_place(self, as_: Tensors, bs: Tensors) -> Read | None:
        return self.reads(as_, bs) if joinable(as_, bs) else None

    def reads(self, as_: Tensors, bs: Tensors) -> Read:
        if not joinable(as_, bs):
            raise UnpairableError("these terms are not read in place")

        def read(as_, bs):
            a, delta_a = distance(as_[0], as_[1], "left operands")
            b, delta_b = distance(bs[0], bs[1], "right operands")
            return as_[a], bs[b], "joined", (delta_a, delta_b, int(a), int(b))

        return read

    def mixins(self, program: EpilogueProgram, variant: str) -> tuple[type, ...]:
        return (JoinedTerms,)


def joinable(as_: Tensors, bs: Tensors) -> bool:
    """Can the sum of ``as_[j] @ bs[j]`` be one product over both K's that is read in place, if
    addresses allow it? It needs two terms of one layout and 16-bit dtype, with whole steps of K and
    rows of 16 bytes. Only K, N, strides and dtypes are read: fake tensors suffice."""
    if len(as_) != 2:
        return False
    (a0, a1), (b0, b1) = as_, bs
    if b0.shape != b1.shape or b0.shape[-2] % _STEP:
        return False
    if a0.dtype not in HALF or any(x.dtype != a0.dtype for x in (a1, b0, b1)):
        return False
    if a0.stride() != a1.stride() or b0.stride() != b1.stride():
        return False
    return readable(a0) and readable(b0, either_major=True)


class JoinedTerms:  # a mixin for QuACK kernel classes
    """Changes K of A and B to (f, 2), right after they enter the trace with K = f, and loads A and
    B in an order that begins with the first term."""

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d=append_batch_if_2d
        )
        mA = _over_both_terms(mA, epilogue_args.join_delta_a)
        mB = _over_both_terms(mB, epilogue_args.join_delta_b)
        return mA, mB, mD, mC, epilogue_args

    def epi_get_smem_tensors(self, params, storage):
        self._first = params.join_first_a, params.join_first_b  # for all that follows in the kernel
        return super().epi_get_smem_tensors(params, storage)  # type: ignore[misc]

    def load_tma(self, pipeline, producer_state, copy_fns, k_tile_cnt, k_tile_start=0):
        from cutlass import Int32

        steps = k_tile_cnt // 2

        def ahead(copy, first):
            lower = Int32(first)

            def copy_term(k_tile, smem_idx, **arguments):
                # A flat coordinate would be divided by the steps of a term: 7 % of the time.
                term = Int32(k_tile >= steps)
                copy((k_tile - term * steps, term ^ lower), smem_idx, **arguments)

            return copy_term

        copies = map(ahead, copy_fns[:2], self._first)
        all_copies = [*copies, *copy_fns[2:]]
        return super().load_tma(  # type: ignore[misc]
            pipeline, producer_state, all_copies, k_tile_cnt, k_tile_start=k_tile_start
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
