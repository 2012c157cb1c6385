# SPDX-License-Identifier: Apache-2.0
"""Sizes that may be symbolic: are they equal for certain, and about how large are they?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


def hint(size) -> int:
    """A concrete value for a size that may be symbolic; 8192 if it has no hint, or one that is no
    number (the rows of a nested tensor)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.hint if size.node.has_hint() else None
    return value if isinstance(value, int) else 8192
