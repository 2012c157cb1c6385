# SPDX-License-Identifier: Apache-2.0
"""A linear layer in FP8, by torchao's training recipes, which tell how each factor of its three
products is scaled. Its two gradients are defined here, so that AOTAutograd traces all of them.

Source: torchao 0.18, ``float8/config.py`` (``Float8LinearConfig.from_recipe_name``),
``float8_linear.py`` (``matmul_with_hp_or_float8_args``) and, for layers that are too small to gain,
``float8_linear_utils.py`` (``_auto_filter_for_recipe``), measured there on H100s; it has no limits
for ``rowwise_with_gw_hp``, which gets those of ``rowwise``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coda_inductor.semantic.define import compose
from coda_inductor.semantic.fp8 import quantize, scaled_mm

#: FP8 products need a multiple of this many features.
MULTIPLE = 16


@dataclass(frozen=True)
class Recipe:
    """A recipe. For each product: do its left and its right factor have one scale per row or column
    (True), or one per tensor?

    Attributes:
        forward: y = x W^T.
        dgrad: dx = dy W.
        wgrad: dW = dy^T x; None: in the dtype of x.
        gradient: the FP8 dtype of gradients; weights and inputs are float8_e4m3fn.
        power_of_two: scales are rounded down to powers of two.
    """

    forward: tuple[bool, bool]
    dgrad: tuple[bool, bool]
    wgrad: tuple[bool, bool] | None
    gradient: torch.dtype
    power_of_two: bool


_BOTH, _NEITHER = (True, True), (False, False)
RECIPES = {
    "tensorwise": Recipe(_NEITHER, _NEITHER, _NEITHER, torch.float8_e5m2, power_of_two=False),
    "rowwise": Recipe(_BOTH, _BOTH, _BOTH, torch.float8_e4m3fn, power_of_two=True),
    "rowwise_with_gw_hp": Recipe(
        _BOTH, (True, False), None, torch.float8_e4m3fn, power_of_two=True
    ),
}


def too_small(recipe: str, n: int, k: int) -> bool:
    """Is a linear layer of K input and N output features too small to gain from FP8?"""
    if recipe == "tensorwise":
        return k <= 4096 and n <= 1024
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)


def multiplies(size: Any) -> bool:
    """Can an FP8 product have ``size`` features, or rows that it sums over?"""
    return isinstance(size, int) and size % MULTIPLE == 0


class _Linear(torch.autograd.Function):
    """Of x (M, K) and w (N, K): x w^T (M, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe = how = RECIPES[recipe]
        return _product(x, w.t(), how.forward, how, (torch.float8_e4m3fn,) * 2, fast=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), how, dx, dw = ctx.saved_tensors, ctx.recipe, None, None
        dtypes = how.gradient, torch.float8_e4m3fn
        if ctx.needs_input_grad[0]:
            dx = _product(dy, w, how.dgrad, how, dtypes)
        if ctx.needs_input_grad[1] and how.wgrad is not None and multiplies(dy.shape[0]):
            dw = _product(dy.t(), x, how.wgrad, how, dtypes)
        elif ctx.needs_input_grad[1]:
            dw = dy.t() @ x
        return dx, dw, None


def _product(
    a: Tensor,
    b: Tensor,
    vectors: tuple[bool, bool],
    how: Recipe,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    fast: bool = False,
) -> Tensor:
    """The product of a (M, K) and b (K, N); ``vectors``: is each scaled along K, or as a whole?"""
    q, inv_a = quantize(a, [1] if vectors[0] else [], dtypes[0], how.power_of_two, False)
    r, inv_b = quantize(b, [0] if vectors[1] else [], dtypes[1], how.power_of_two, False)
    after = all(vectors) and not fast
    return scaled_mm(q, r, inv_a, inv_b, a.dtype, fast, after)


def fp8_linear_composition(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype
) -> Tensor:
    """``F.linear(x, weight, bias)`` (..., N) of x (..., K), weight (N, K) and bias (N,), multiplied
    in FP8 by ``recipe``. All are cast to ``dtype`` first, that of the result."""
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    y = _Linear.apply(rows, weight.to(dtype), recipe)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


fp8_linear = compose(
    "fp8_linear(Tensor x, Tensor weight, Tensor? bias, str recipe, ScalarType dtype) -> Tensor",
    fp8_linear_composition,
    name="fp8_linear",
)
