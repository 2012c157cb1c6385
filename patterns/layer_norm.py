# SPDX-License-Identifier: Apache-2.0
"""LayerNorm as users write it, raised to ``coda_inductor::layer_norm``.

Before::

    y = F.layer_norm(x, (d,), weight, bias, eps)         # also nn.LayerNorm

    h = x.to(torch.float32)                              # Cohere's, also without the casts
    mean = h.mean(-1, keepdim=True)
    var = (h - mean).pow(2).mean(-1, keepdim=True)       # or h.var(-1, keepdim=True, correction=0)
    y = weight * ((h - mean) * torch.rsqrt(var + eps)) + bias

After::

    y, mean, rstd = coda_inductor.layer_norm(x, weight, bias, eps, dtype_of(y))

Why it is valid: both sides are (x - mean) / sqrt(var + eps) * weight + bias; casts only change the
precision. The op computes in float32 (float64 for float64), never in less than the idiom.

What it enables (coda_inductor.rewrite.norm): rule R5,
LN(x) W = D_rstd ((x.weight) W - mean (weight^T W)) + bias^T W: both statistics leave the GEMM
before it as partials and are applied after the GEMMs that read the norm.

Refuses: statistics not over the whole last dimension; an unbiased variance; eps that is not a
number; a weight or bias that is not one value per column; a result whose shape is not x's; an input
that is not floating. Files are tried in the order of their names: this one before ``rms_norm``,
which would match the same idiom with x - mean as its input.
"""

import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, number, row, row_wise
from coda_inductor.patterns.spellings import norms
from coda_inductor.semantic import layer_norm


def by_squares(x):
    return (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)


def by_var(x):
    return x.var(-1, keepdim=True, correction=0)


def centered(x):
    return x - x.mean(-1, keepdim=True)


def functional(x, weight, bias, eps):
    return torch.layer_norm(x, (1,), weight, bias, eps)


def biased(weighted):
    def affine(x, weight, bias, eps):
        return weighted(x, weight, eps) + bias

    return affine


def spellings(variance):
    """With weight and bias, with a weight only, and bare: most specific first."""
    weighted, bare = norms(centered, variance)
    return *map(biased, weighted), *weighted, *bare


def _arguments(match: Match):
    weight, bias = row(match, "weight"), row(match, "bias")
    return (match.bound["x"], weight, bias, number(match, "eps"), value(match.root).dtype)


PATTERN = Pattern(
    name="layer_norm",
    idioms=(functional, *spellings(by_squares), *spellings(by_var)),
    op=layer_norm,
    arguments=_arguments,
    conditions=(constant("eps"), row_wise("weight", "bias")),
    result=0,
    example={"x": (2, 3), "weight": (3,), "bias": (3,), "eps": 1e-5},
)
