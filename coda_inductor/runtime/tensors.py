"""Tensors as TMA wants them, and the view that makes two weights one operand."""

from __future__ import annotations

import functools
import types

import torch
from torch import Tensor

_ALIGN = 16  # bytes, for pointers and strides
_MAX_STRIDE = 2**40  # bytes


class UnpairableError(ValueError):
    """Two weights cannot be read as one operand; the message names the condition."""


def tma_matrix(x: Tensor, either_major: bool = False) -> Tensor:
    """``x`` (rows, columns) itself if TMA can read it, else a contiguous copy of it.

    TMA wants one unit stride (the last; either, with ``either_major``) and 16-byte multiples for
    the pointer and the other stride.
    """
    if x.data_ptr() % _ALIGN == 0:
        rows, columns = x.stride()
        step = _ALIGN // x.element_size()
        if columns == 1 and rows >= x.shape[1] and rows % step == 0:
            return x
        if either_major and rows == 1 and columns >= x.shape[0] and columns % step == 0:
            return x
    return x.clone(memory_format=torch.contiguous_format)


def vector(x: Tensor) -> Tensor:
    """``x`` (length,), contiguous and 16-byte aligned; itself if it is so already."""
    if x.stride(0) != 1 or x.data_ptr() % _ALIGN:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def pair_order(b0: Tensor, b1: Tensor) -> tuple[bool, int]:
    """(b1 lies lower, the distance in elements) of two weights, each (K, N) and K-major.

    Raises:
        UnpairableError: naming the condition of ``kernels.pair`` that does not hold.
    """
    if b0.shape != b1.shape or b0.stride() != b1.stride() or b0.dtype != b1.dtype:
        raise UnpairableError("the paired weights differ in shape, strides or dtype")
    if b0.stride(0) != 1 or b0.stride(1) % 8 or b0.stride(1) < b0.shape[0]:
        raise UnpairableError("the paired weights are not K-major with 16-byte rows")
    first, second = b0.data_ptr(), b1.data_ptr()
    distance = abs(second - first)
    if first % _ALIGN or distance % _ALIGN or not 0 < distance < _MAX_STRIDE:
        raise UnpairableError("the paired weights are not a legal TMA stride apart")
    return second < first, distance // b0.element_size()


@functools.lru_cache(maxsize=1024)
def _foreign_view(pointer: int, rows: int, columns: int, stride: int, dtype, device) -> Tensor:
    """A non-owning (rows, columns) view of device memory; what lies between is never touched."""
    memory = types.SimpleNamespace(
        __cuda_array_interface__={
            "shape": (rows, columns),
            "strides": (stride * 2, 2),
            "typestr": "<u2",
            "data": (pointer, False),
            "version": 3,
        }
    )
    return torch.as_tensor(memory, device=device).view(dtype)


def pair_view(b0: Tensor, b1: Tensor) -> tuple[Tensor, int, bool]:
    """(operand, delta, swapped) for two 16-bit weights, each (K, N) and K-major.

    The operand is (K, 2N), starts at the lower weight and must only ever be read through the
    ((2, N), K) layout of ``coda_inductor.kernels.pair``. Non-owning: the caller keeps b0 and b1.

    Raises:
        UnpairableError: see :func:`pair_order`.
    """
    swapped, delta = pair_order(b0, b1)
    lower = b1 if swapped else b0
    k, n = lower.shape
    view = _foreign_view(lower.data_ptr(), 2 * n, k, lower.stride(1), lower.dtype, lower.device)
    return view.t(), delta, swapped
