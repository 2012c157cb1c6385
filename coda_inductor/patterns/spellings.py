# SPDX-License-Identifier: Apache-2.0
"""Common ways to write norms of rows."""

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


def norms(core: Function, square: Function) -> tuple[tuple[Function, ...], tuple[Function, ...]]:
    """(idioms with a weight, idioms without) for ``weight * core(x) / sqrt(square(x) + eps)``."""

    def inverse(x: Any, eps: Any) -> Any:
        return torch.rsqrt(square(x) + eps)

    def root(x: Any, eps: Any) -> Any:
        return torch.sqrt(square(x) + eps)

    def last(x: Any, weight: Any, eps: Any) -> Any:
        return weight * (inverse(x, eps) * core(x))

    def early(x: Any, weight: Any, eps: Any) -> Any:
        return inverse(x, eps) * (weight * core(x))

    def folded(x: Any, weight: Any, eps: Any) -> Any:
        return core(x) * (inverse(x, eps) * weight)

    def last_over(x: Any, weight: Any, eps: Any) -> Any:
        return weight * (core(x) / root(x, eps))

    def early_over(x: Any, weight: Any, eps: Any) -> Any:
        return (weight * core(x)) / root(x, eps)

    def bare(x: Any, eps: Any) -> Any:
        return inverse(x, eps) * core(x)

    def bare_over(x: Any, eps: Any) -> Any:
        return core(x) / root(x, eps)

    return (last, early, folded, last_over, early_over), (bare, bare_over)
