# SPDX-License-Identifier: Apache-2.0
"""Sizes that may be symbolic: are they equal for certain, about how large are they, and how does a
shape cover another one?"""

import math
from typing import Any

import torch
from torch import Tensor

from coda_inductor.compat import tree_leaves
from coda_inductor.program.ir import LEAST_PART


def same(left: Any, right: Any) -> bool:
    """Are two sizes (or shapes) certainly equal? Never adds a guard."""
    if isinstance(left, (tuple, list, torch.Size)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    # Not at the top: a process that compiles kernels has no symbols, and should not import sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(left == right)


def same_strides(left: Tensor, right: Tensor) -> bool:
    """Do two tensors of one shape certainly have equal strides in dimensions longer than 1?"""
    sizes = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(same(n, 1) or same(a, b) for n, a, b in sizes)


def alike(left: Any, right: Any) -> bool:
    """May two values, tensors or trees of them, have equal sizes and strides? Symbols are compared
    by their hints; strides count in dimensions longer than 1."""
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    both = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(strides(a) == strides(b) for a, b in both if a.layout == torch.strided)


def strides(tensor: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of each dimension of ``tensor``, as hints; 0 is a stride that never counts."""
    sizes = ((hint(n), hint(s)) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return [(n, s if n > 1 else 0) for n, s in sizes]


def same_layout(left: Tensor, right: Tensor) -> bool:
    """Have two tensors certainly one dtype, one shape and one layout?"""
    shapes = same(left.shape, right.shape) and same(left.stride(), right.stride())
    return shapes and left.dtype == right.dtype


def hint(size) -> int:
    """A concrete value for a size that may be symbolic; 8192 if it has no hint, or one that is no
    number (the rows of a nested tensor)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.hint if size.node.has_hint() else None
    return value if isinstance(value, int) else 8192


def classify(shape: tuple, full: tuple) -> str | None:
    """The operand kind of a tensor of ``shape`` broadcast against ``full`` = (*lead, N).

    Returns None if it broadcasts over only some leading dimensions. The exception is the first one:
    then each row of a batch has a vector, and must be as large as a kernel's tiles.
    """
    if len(shape) > len(full):
        return None
    padded = (1,) * (len(full) - len(shape)) + tuple(shape)
    if all(same(size, 1) for size in padded):
        return "scalar"
    if same(padded[-1], full[-1]) and all(same(size, 1) for size in padded[:-1]):
        return "row"
    is_batch = same(padded, (full[0], *[1] * (len(full) - 2), full[-1]))
    if is_batch and hint(math.prod(full[1:-1])) >= LEAST_PART:
        return "batch"
    if same(padded[-1], 1) and same(padded[:-1], full[:-1]):
        return "col"
    return "tile" if same(padded, full) else None
