# SPDX-License-Identifier: Apache-2.0
"""Layouts of tensors that TMA requires, and the conditions under which two are one operand."""

from collections.abc import Callable

import torch
from torch import Tensor

from coda_inductor.graph.sizes import same

ALIGN = 16  # bytes, for pointers and strides
_MAX_STRIDE = 2**40  # bytes
#: Every distance must be a multiple of this many elements: 16 bytes of a 16-bit type, for TMA.
DELTA_DIVISOR = 8


def a_major(a: Tensor) -> str:
    """The dimension of A (M, K) with stride 1: "m" or "k"; "k" if both may have it."""
    return "m" if same(a.stride(0), 1) and not same(a.stride(1), 1) else "k"


def b_major(b: Tensor) -> str:
    """The dimension of B (K, N) or (E, K, N) with stride 1: "n", or "k" as in a layer's weight."""
    return "n" if same(b.stride(-1), 1) and not same(b.stride(-2), 1) else "k"


class UnpairableError(ValueError):
    """Two matrices cannot be read as one operand; the message names the condition."""


def tma_matrix(x: Tensor, either_major: bool = False) -> Tensor:
    """``x`` itself, (rows, columns) or (E, rows, columns), if TMA can read it, else a contiguous
    copy of it. TMA requires stride 1 in the last dimension (with ``either_major``, in one of the
    last two), and multiples of 16 bytes for the pointer and the other strides."""
    if x.data_ptr() % ALIGN == 0 and readable(x, either_major):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def readable(x: Tensor, either_major: bool = False) -> bool:
    """Can TMA read ``x``, apart from its pointer? See :func:`tma_matrix`. Fake tensors suffice."""
    *batches, rows, columns = x.stride()
    step = ALIGN // x.element_size()
    if any(stride % step for stride in batches):
        return False
    if columns == 1 and rows >= x.shape[-1] and rows % step == 0:
        return True
    return either_major and rows == 1 and columns >= x.shape[-2] and columns % step == 0


def vector(x: Tensor) -> Tensor:
    """``x``, (length,) or (E, length), or a copy if not contiguous or 16-byte aligned."""
    if x.stride(-1) != 1 or not x.is_contiguous() or x.data_ptr() % ALIGN:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def laid_out(make: Callable[..., Tensor], rows: int, columns: int, row_major: bool) -> Tensor:
    """A tensor (rows, columns) from ``make``, a function of a shape, in the given layout."""
    return make(rows, columns) if row_major else make(columns, rows).mT


def distance(x: Tensor, y: Tensor, label: str) -> tuple[bool, int]:
    """(is y at the lower address, the distance in elements) for two matrices of one dtype. Raises
    UnpairableError if TMA does not accept the distance as a stride."""
    first, second = x.data_ptr(), y.data_ptr()
    gap = abs(second - first)
    if first % ALIGN or gap % ALIGN or not 0 < gap < _MAX_STRIDE:
        raise UnpairableError(f"the distance of the {label} is not a legal TMA stride")
    return second < first, gap // x.element_size()
