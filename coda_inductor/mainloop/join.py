# SPDX-License-Identifier: Apache-2.0
"""Two products summed as one GEMM over both K's, read in place by two TMA descriptors.

The gradient through gate and up is ``dh = dG Wg + dU Wu``: four separately allocated matrices, one
sum. It is one product over a K twice as long, if A is [dG, dU] side by side and B is [Wg; Wu] one
above the other. Nothing has to be copied for that, by the trick of ``pair``: a stride may be *the
distance between two allocations*. With f the K of one term::

    A[i, (k, term)]  at  a + term * delta_a + i * lda + k        shape (M, (f, 2))
    B[(k, term), j]  at  b + term * delta_b + k * ldb + j        shape ((f, 2), N)

where a and b are the lower of the two addresses each. The main loop walks K in steps of 64, so f
must be a multiple of that: a step then lies in one term. It sees 2 f / 64 steps and nothing else.

Strides are unsigned, so each operand starts at its lower allocation. A sum does not mind the order,
as long as both operands have the same: if they do not ("crossed"), B is walked half a turn ahead.
That is a second variant of the kernel; which one runs is known at the launch. The distances are
launch arguments, so one compiled kernel of each variant serves all matrices. Conditions, checked at
run time by ``runtime.tensors.joint_view``.
"""

from __future__ import annotations

import cutlass.cute as cute

from coda_inductor.mainloop.resources import DELTA_DIVISOR, Distance

#: One step of the main loop along K, in elements of a 16-bit type.
_STEP = 64

DISTANCES = (Distance("join_delta_a"), Distance("join_delta_b"))


class JoinedTerms:  # a mixin for QuACK kernel classes
    """Lays K of A and B out as (f, 2) right after they have crossed into the trace with K = f."""

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d=append_batch_if_2d
        )
        mA = _over_both_terms(mA, epilogue_args.join_delta_a)
        mB = _over_both_terms(mB, epilogue_args.join_delta_b)
        return mA, mB, mD, mC, epilogue_args


class CrossedTerms(JoinedTerms):
    """As JoinedTerms, where the terms of A and B lie in opposite orders."""

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
    """(rows, f, 1) -> (rows, (64, f / 64, 2), 1): a step of the main loop is the first K mode."""
    rows, k, batch = matrix.shape
    row_stride, k_stride, batch_stride = matrix.stride
    delta = cute.assume(delta, divby=DELTA_DIVISOR)
    layout = cute.make_layout(
        (rows, (_STEP, k // _STEP, 2), batch),
        stride=(row_stride, (k_stride, _STEP * k_stride, delta), batch_stride),
    )
    return cute.make_tensor(matrix.iterator, layout)
