# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of neighbouring pairs in the semantic vocabulary, without complex numbers,
which Inductor generates no code for."""

from __future__ import annotations

import torch
from torch import Tensor

from coda_inductor.semantic.define import define, statistics_dtype


def rotate_pairs_definition(
    x: Tensor, turns: Tensor, inverse: bool, out_dtype: torch.dtype
) -> Tensor:
    """Columns 2j and 2j + 1 of ``x`` (..., D) as a complex number, times ``turns`` (complex,
    broadcastable to (..., D / 2)), or with ``inverse`` times its conjugate.

    Computed in float32 (float64 for float64), cast to ``out_dtype``. Source: Su et al., "RoFormer"
    (arXiv 2104.09864), section 3.2.
    """
    pairs = x.to(statistics_dtype(x.dtype)).unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    cos, sin = torch.view_as_real(turns).unbind(-1)
    sin = -sin if inverse else sin
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(out_dtype)


def _rotate_back(dy: Tensor, x: Tensor, turns: Tensor, inverse: bool) -> Tensor:
    return rotate_pairs(dy, turns, not inverse, x.dtype)


rotate_pairs = define(
    "rotate_pairs(Tensor x, Tensor turns, bool inverse, ScalarType out_dtype) -> Tensor",
    rotate_pairs_definition,
    gradient=_rotate_back,
    of=("x",),
)
