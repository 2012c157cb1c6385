# SPDX-License-Identifier: Apache-2.0
"""Two separately allocated weights, read interleaved by one TMA descriptor, zero-copy.

A gated MLP needs ``g = X Wg`` and ``u = X Wu`` at the same place: column j of both must meet in one
tile (rule R6 of the design). Models keep the two weights as separate parameters, each (N, K) and
contiguous. Packing them would copy them, or move a trained parameter's storage.

Neither is needed. A TMA descriptor describes up to five dimensions with arbitrary strides, and a
stride may be *the distance between two allocations*. Let ``w0`` be the weight at the lower address
and ``delta`` the distance to the other one, in elements. Then

    B[(lane, j), k]  at  w0 + lane * delta + j * ldb + k          shape ((2, N), K)

is one legal tensor whose rows alternate between the two weights: row 2j is row j of the first,
row 2j + 1 row j of the second. Nothing between the two allocations is ever touched, for every
element of the tensor lies in one of them. The GEMM over it has N' = 2N columns, neighbouring
accumulator columns are (g_j, u_j), and QuACK's paired epilogue consumes them.

What crosses into the kernel is an ordinary 2N x K tensor that starts at ``w0`` (its second half is
never addressed, see ``runtime.tensors.pair_view``) and ``delta``, a runtime Int64, so that one
compiled kernel serves every pair of weights. Conditions, checked at run time: equal shape and
strides, K-major, delta positive (strides are unsigned, hence two variants of the kernel with
the lanes swapped), a multiple of 16 bytes and below 2**40 bytes.
"""

from __future__ import annotations

import cutlass.cute as cute

from coda_inductor.mainloop.resources import Distance

DISTANCE = Distance("pair_delta")


class PairedWeights:  # a mixin for QuACK kernel classes
    """Lays B out as ((2, N), K) right after it has crossed into the trace."""

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d=append_batch_if_2d
        )
        # 16 bytes, as TMA wants.
        delta = cute.assume(epilogue_args.pair_delta, divby=128 // mB.element_type.width)
        columns = cute.size(mB, mode=[0]) // 2
        layout = cute.make_layout(
            ((2, columns), *mB.shape[1:]), stride=((delta, mB.stride[0]), *mB.stride[1:])
        )
        return mA, cute.make_tensor(mB.iterator, layout), mD, mC, epilogue_args
