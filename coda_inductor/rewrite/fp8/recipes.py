# SPDX-License-Identifier: Apache-2.0
"""torchao's recipes of FP8 training: how each factor of a linear layer's three products is scaled.

Source: torchao 0.18, ``float8/config.py`` (``Float8LinearConfig.from_recipe_name``),
``float8_linear.py`` (``matmul_with_hp_or_float8_args``) and, for layers that are too small to gain,
``float8_linear_utils.py`` (``_auto_filter_for_recipe``), measured there on H100s; it has no limits
for ``rowwise_with_gw_hp``, which gets those of ``rowwise``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

#: FP8 multiplies multiples of this many features.
MULTIPLE = 16


class Role(Enum):
    """Which of a linear layer's products: y = x W^T, dx = dy W, dW = dy^T x."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        vectors: of each product that is in FP8: has each factor, the left and the right one, a
            scale for each row or column (True), or one for the tensor?
        gradient: the FP8 dtype of gradients; weights and inputs are float8_e4m3fn.
        power_of_two: scales are rounded down to powers of two.
    """

    vectors: dict[Role, tuple[bool, bool]]
    gradient: torch.dtype
    power_of_two: bool


_ALL = (Role.FORWARD, Role.INPUT_GRADIENT, Role.WEIGHT_GRADIENT)
_BOTH, _NEITHER = (True, True), (False, False)

RECIPES = {
    "tensorwise": Recipe(dict.fromkeys(_ALL, _NEITHER), torch.float8_e5m2, power_of_two=False),
    "rowwise": Recipe(dict.fromkeys(_ALL, _BOTH), torch.float8_e4m3fn, power_of_two=True),
    "rowwise_with_gw_hp": Recipe(
        {Role.FORWARD: _BOTH, Role.INPUT_GRADIENT: (True, False)},
        torch.float8_e4m3fn,
        power_of_two=True,
    ),
}


def too_small(recipe: str, n: int, k: int) -> bool:
    """Is a linear layer of K input and N output features one that does not gain from FP8?"""
    if recipe == "tensorwise":
        return k <= 4096 and n <= 1024
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
