# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as users write it, raised to ``coda_inductor::rms_norm``.

Before::

    h = x.to(torch.float32)                       # Hugging Face, also without the casts
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * h.to(x.dtype)                    # weight absent, on either side, or before rsqrt

    y = F.rms_norm(x, (d,), weight, eps)          # also nn.RMSNorm, eps given or None

After::

    y, rstd = coda_inductor.rms_norm(x, weight, eps, dtype_of(y))

Why it is valid: both sides are x * rsqrt(mean(x^2) + eps) * weight; casts only change the
precision. The op computes in float32 (float64 for float64), never in less than the idiom.

What it enables (coda_inductor.rewrite.norm): rule R1, (D_r X) W = D_r (X W): the row scale rstd
moves past the GEMM that follows; rule R2: its statistics leave the GEMM before it as partials.

Refuses: statistics not over the whole last dimension; eps that is not a number (a tensor, or read
from one); a weight that is not one value per column; a result whose shape is not x's; an input
that is not floating.
"""

import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, number, row, row_wise
from coda_inductor.semantic import rms_norm


def inverse(x, eps):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def root(x, eps):
    return torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def last(x, weight, eps):
    return weight * (inverse(x, eps) * x)


def early(x, weight, eps):
    return inverse(x, eps) * (weight * x)


def folded(x, weight, eps):
    return x * (inverse(x, eps) * weight)


def last_over(x, weight, eps):
    return weight * (x / root(x, eps))


def early_over(x, weight, eps):
    return (weight * x) / root(x, eps)


def bare(x, eps):
    return inverse(x, eps) * x


def bare_over(x, eps):
    return x / root(x, eps)


def functional(x, weight, eps):
    return torch.rms_norm(x, (1,), weight, eps)


def _arguments(match: Match):
    x, weight = match.bound["x"], row(match, "weight")
    if match.bound["eps"] is None:  # the epsilon of the compute dtype: float32's for 16-bit types
        eps = torch.finfo(torch.promote_types(value(x).dtype, torch.float32)).eps
    else:
        eps = number(match, "eps")
    return (x, weight, eps, value(match.root).dtype)


PATTERN = Pattern(
    name="rms_norm",
    idioms=(functional, last, early, folded, last_over, early_over, bare, bare_over),
    op=rms_norm,
    arguments=_arguments,
    conditions=(constant("eps", none=True), row_wise("weight")),
    result=0,
    example={"x": (2, 3), "weight": (3,), "eps": 1e-5},
)
