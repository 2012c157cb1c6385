# SPDX-License-Identifier: Apache-2.0
"""Two separately allocated weights, read interleaved by one TMA descriptor.

A gated MLP needs ``g = X Wg`` and ``u = X Wu`` at one place: column j of both in one tile (rule R6
of the design). A TMA descriptor takes arbitrary strides, and a stride may be *the distance between
two allocations*. With ``w0`` the weight at the lower address, and ``delta`` the distance to the
other one, in elements,

    B[(lane, j), k]  at  w0 + lane * delta + j * ldb + k          shape ((2, N), K)

is one tensor whose rows alternate between the weights, and whose elements are all in one of them.
The GEMM over it has N' = 2N columns, of which QuACK's paired epilogue takes neighbors, (g_j, u_j).

The kernel's arguments are an ordinary 2N x K tensor that starts at ``w0``, whose second half is
never addressed, and ``delta``, a runtime Int64: one compiled kernel serves every pair. Conditions,
checked at run time: equal shape and strides, K-major, delta positive (strides are unsigned, hence
two variants of the kernel), a multiple of 16 bytes and below 2**40 bytes. Weights that do not meet
them are copied: with several GPUs, CUDA may place two allocations of one GPU 2**46 bytes apart.
"""

import functools
import types
from typing import Any

import torch
from torch import Tensor

from coda_inductor.mainloop.readings.plain import Binding, Plain, Read, Tensors, Why
from coda_inductor.mainloop.tensors import UnpairableError, distance, readable
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import HALF_NAMES

_LABEL = "paired weights"


class Pair(Plain):
    """Reads one A (M, K) and two B's (K, N) or (E, K, N), K-major, of 16 bits. The variant
    "swapped" is for a second weight at the lower address."""

    variants: tuple[str, ...] = ("", "swapped")
    distances: tuple[str, ...] = ("pair_delta",)

    def fits(self, program: EpilogueProgram, terms: int) -> bool:
        return program.paired

    def refuses(self, site: Any) -> Why:
        wide = next((s for s in site.program.stores if s.dtype not in HALF_NAMES), None)
        if wide is not None:
            text = f"store {wide.name!r}: paired stores are 16-bit, not {wide.dtype}"
            return "paired-store-wide", text
        if site.b_major != "k":
            text = "paired weights must be K-major (out_features x in_features)"
            return "paired-weight-layout", text
        return super().refuses(site)

    def suits(self, program: EpilogueProgram, config: Any) -> bool:
        return config.tile_n % 32 == 0 and config.tile_m != 192

    def bind(self, as_: Tensors, bs: Tensors) -> Binding:
        as_ = [self.left(as_[0])]
        try:
            return self.reads(as_, bs)(as_, bs)
        except UnpairableError:
            both = side_by_side(bs)
        pair_order(*both.mT)
        return as_[0], both.as_strided(*_layout(both[0].mT)).mT, "", (both.stride(0),)

    def reads(self, as_: Tensors, bs: Tensors) -> Read:
        pair_order(*bs)
        shape, strides = _layout(bs[0])
        dtype, device = bs[0].dtype, bs[0].device

        def read(as_, bs):
            swapped, delta = distance(bs[0], bs[1], _LABEL)
            view = foreign_view(bs[swapped].data_ptr(), shape, strides, dtype, device)
            return as_[0], view, "swapped" if swapped else "", (delta,)

        return read

    def mixins(self, program: EpilogueProgram, variant: str) -> tuple[type, ...]:
        return (PairedWeights, *super().mixins(program, variant))


def _layout(b: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    (*batch, k, n), (*batches, _, row) = b.shape, b.stride()
    return (*batch, 2 * n, k), (*batches, row, 1)


def side_by_side(bs: Tensors) -> Tensor:
    """A copy (2, N, K) or (2, E, N, K) of two weights, each (K, N) or (E, K, N). Raises
    UnpairableError if they differ in shape or dtype."""
    first, second = bs
    if first.shape != second.shape or first.dtype != second.dtype:
        raise UnpairableError("the paired weights differ in shape or dtype")
    both = first.new_empty(2, *first.mT.shape)
    for copy, b in zip(both, bs, strict=True):
        copy.copy_(b.mT)
    return both


def pair_order(b0: Tensor, b1: Tensor) -> tuple[bool, int]:
    """(is b1 at the lower address, the distance in elements) for two weights, each (K, N), or (E,
    K, N), and K-major. Raises UnpairableError, which names a condition that fails."""
    if b0.shape != b1.shape or b0.stride() != b1.stride() or b0.dtype != b1.dtype:
        raise UnpairableError("the paired weights differ in shape, strides or dtype")
    if not readable(b0.mT):
        raise UnpairableError("the paired weights are not K-major with 16-byte rows")
    return distance(b0, b1, _LABEL)


@functools.lru_cache(maxsize=1024)
def foreign_view(pointer: int, shape, strides, dtype: torch.dtype, device) -> Tensor:
    """A non-owning view, (K, N) or (E, K, N), of device memory with the layout (N, K) or (E, N, K);
    memory in between is never accessed."""
    size = dtype.itemsize
    memory = types.SimpleNamespace(
        __cuda_array_interface__={
            "shape": shape,
            "strides": tuple(stride * size for stride in strides),
            "typestr": "<u2" if size == 2 else "|u1",
            "data": (pointer, False),
            "version": 3,
        }
    )
    return torch.as_tensor(memory, device=device).view(dtype).mT


class PairedWeights:  # a mixin for QuACK kernel classes
    """Changes B to ((2, N), K), right after B enters the trace."""

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d=append_batch_if_2d
        )
        import cutlass.cute as cute

        # 16 bytes, as TMA requires.
        delta = cute.assume(epilogue_args.pair_delta, divby=128 // mB.element_type.width)
        columns = cute.size(mB, mode=[0]) // 2
        layout = cute.make_layout(
            ((2, columns), *mB.shape[1:]), stride=((delta, mB.stride[0]), *mB.stride[1:])
        )
        return mA, cute.make_tensor(mB.iterator, layout), mD, mC, epilogue_args
