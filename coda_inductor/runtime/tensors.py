# SPDX-License-Identifier: Apache-2.0
"""Tensors as TMA wants them, and the conditions under which two of them are one operand."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence

import torch
from torch import Tensor

from coda_inductor.program.dtypes import HALF

_ALIGN = 16  # bytes, for pointers and strides
_MAX_STRIDE = 2**40  # bytes


_STEP = 64  # elements of K in one step of the main loop


class UnpairableError(ValueError):
    """Two matrices cannot be read as one operand; the message names the condition."""


def tma_matrix(x: Tensor, either_major: bool = False) -> Tensor:
    """``x`` (rows, columns) itself if TMA can read it, else a contiguous copy of it.

    TMA wants one unit stride (the last; either, with ``either_major``) and 16-byte multiples for
    the pointer and the other stride.
    """
    if x.data_ptr() % _ALIGN == 0 and readable(x, either_major):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def readable(x: Tensor, either_major: bool = False) -> bool:
    """Can TMA read ``x`` (rows, columns), whatever its pointer? See :func:`tma_matrix`."""
    rows, columns = x.stride()
    step = _ALIGN // x.element_size()
    if columns == 1 and rows >= x.shape[1] and rows % step == 0:
        return True
    return either_major and rows == 1 and columns >= x.shape[0] and columns % step == 0


def vector(x: Tensor) -> Tensor:
    """``x`` (length,), contiguous and 16-byte aligned; itself if it is so already."""
    if x.stride(0) != 1 or x.data_ptr() % _ALIGN:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def pair_order(b0: Tensor, b1: Tensor) -> tuple[bool, int]:
    """(b1 lies lower, the distance in elements) of two weights, each (K, N) and K-major.

    Raises:
        UnpairableError: naming the condition of ``mainloop.pair`` that does not hold.
    """
    if b0.shape != b1.shape or b0.stride() != b1.stride() or b0.dtype != b1.dtype:
        raise UnpairableError("the paired weights differ in shape, strides or dtype")
    step = _ALIGN // b0.element_size()
    if b0.stride(0) != 1 or b0.stride(1) % step or b0.stride(1) < b0.shape[0]:
        raise UnpairableError("the paired weights are not K-major with 16-byte rows")
    return distance(b0, b1, "paired weights")


def distance(x: Tensor, y: Tensor, what: str) -> tuple[bool, int]:
    """(y lies lower, the distance in elements) of two matrices of one dtype.

    Raises:
        UnpairableError: it is no distance that TMA takes for a stride.
    """
    first, second = x.data_ptr(), y.data_ptr()
    gap = abs(second - first)
    if first % _ALIGN or gap % _ALIGN or not 0 < gap < _MAX_STRIDE:
        raise UnpairableError(f"the {what} are not a legal TMA stride apart")
    return second < first, gap // x.element_size()


@functools.lru_cache(maxsize=1024)
def foreign_view(pointer: int, rows: int, columns: int, stride: int, dtype, device) -> Tensor:
    """A non-owning (rows, columns) view of device memory; what lies between is never touched."""
    size = dtype.itemsize
    memory = types.SimpleNamespace(
        __cuda_array_interface__={
            "shape": (rows, columns),
            "strides": (stride * size, size),
            "typestr": "<u2" if size == 2 else "|u1",
            "data": (pointer, False),
            "version": 3,
        }
    )
    return torch.as_tensor(memory, device=device).view(dtype)


def pair_view(b0: Tensor, b1: Tensor) -> tuple[Tensor, int, bool]:
    """(operand, delta, swapped) for two weights of 16 or 8 bits, each (K, N) and K-major.

    The operand is (K, 2N), starts at the lower weight and must only ever be read through the
    ((2, N), K) layout of ``coda_inductor.mainloop.pair``. Non-owning: the caller keeps b0 and b1.

    Raises:
        UnpairableError: see :func:`pair_order`.
    """
    swapped, delta = pair_order(b0, b1)
    lower = b1 if swapped else b0
    k, n = lower.shape
    view = foreign_view(lower.data_ptr(), 2 * n, k, lower.stride(1), lower.dtype, lower.device)
    return view.t(), delta, swapped


def unjoinable(as_: Sequence[Tensor], bs: Sequence[Tensor]) -> str | None:
    """Why the sum of ``as_[j] @ bs[j]`` cannot be one product over both K's that is read in place,
    or None if it can, addresses aside. Asks for K, N, strides and dtypes: fake tensors will do."""
    if len(as_) != 2:
        return f"{len(as_)} terms: only two are read in place"
    (a0, a1), (b0, b1) = as_, bs
    k, n = b0.shape
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
    unit, rows, length = (*reversed(b_stride), n) if b_stride[1] == 1 else (*b_stride, k)
    if unit != 1 or rows % 8 or rows < length:
        return "the right operands have no unit stride or no 16-byte rows"
    return None


def joint_view(
    as_: Sequence[Tensor], bs: Sequence[Tensor]
) -> tuple[Tensor, Tensor, int, int, bool]:
    """(A, B, delta_a, delta_b, crossed) for two terms, each (M, f) times (f, N), of one sum.

    A and B are the terms' operands at the lower addresses, the deltas the distances to the others
    in elements; ``crossed`` says that these two are not of one term. See ``mainloop.join``.

    Raises:
        UnpairableError: naming the condition that does not hold.
    """
    reason = unjoinable(as_, bs)
    if reason is not None:
        raise UnpairableError(reason)
    a_lower, delta_a = distance(as_[0], as_[1], "left operands")
    b_lower, delta_b = distance(bs[0], bs[1], "right operands")
    return as_[a_lower], bs[b_lower], delta_a, delta_b, a_lower != b_lower
