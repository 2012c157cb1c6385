# SPDX-License-Identifier: Apache-2.0
"""Rows over their length, as users write it, raised to ``coda_inductor::l2_norm``.

Before::

    y = F.normalize(x, dim=-1) * d ** 0.5 * weight        # lucidrains' RMSNorm, in any order
    y = x / x.norm(dim=-1, keepdim=True).clamp_min(eps) * d ** 0.5 * weight
    y = x / (x.norm(dim=-1, keepdim=True) * d ** -0.5).clamp(min=eps) * weight

After::

    y, rstd, radial = coda_inductor.l2_norm(x, weight, scale, floor, dtype_of(y))

Why it is valid: both sides are x * scale / max(||x||, floor) * weight, for share * ||x|| is at most
eps where ||x|| is at most eps / share. Source: Zhang and Sennrich, "Root Mean Square Layer
Normalization" (arXiv 1910.07467), eq. 4, for scale = sqrt(d). The op computes in float32 (float64
for float64), never less than the idiom did.

What it enables (coda_inductor.rewrite.norm): rules R1 and R2, as for an RMSNorm.

Refuses: lengths not of the whole last dimension; numbers that are tensors; a share that is not
positive; a weight that is not one value a column; a result whose shape is not x's.
"""

import torch
import torch.nn.functional as F

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, number, row, row_wise
from coda_inductor.refusal import refuse
from coda_inductor.semantic import l2_norm


def normalized(x, eps):
    return F.normalize(x, 2.0, -1, eps)


def divided(x, eps):
    return x / torch.linalg.vector_norm(x, 2, -1, True).clamp_min(eps)


def shared(x, eps, share):
    return x / (torch.linalg.vector_norm(x, 2, -1, True) * share).clamp_min(eps)


def factors(by):
    """With a weight and a number, in any order, or with one of them, or none."""

    def outside(x, eps, first, second):
        return (by(x, eps) * first) * second

    def together(x, eps, first, second):
        return by(x, eps) * (first * second)

    def one(x, eps, first):
        return by(x, eps) * first

    def bare(x, eps):
        return by(x, eps)

    return outside, together, one, bare


def shared_factors():
    """The same, where the length is a share of the norm."""

    def outside(x, eps, share, first, second):
        return (shared(x, eps, share) * first) * second

    def together(x, eps, share, first, second):
        return shared(x, eps, share) * (first * second)

    def one(x, eps, share, first):
        return shared(x, eps, share) * first

    return outside, together, one, shared


def _parts(match: Match):
    """The names of what is bound to tensors, x aside, and to numbers."""
    others = [name for name in match.bound if name != "x"]
    tensors = [name for name in others if isinstance(value(match.bound[name]), torch.Tensor)]
    return tensors, [name for name in others if name not in tensors]


def _weights_and_numbers(match: Match):
    tensors, numbers = _parts(match)
    for name in ("eps", "share"):
        if name in tensors:
            return constant(name)(match)
    if len(tensors) > 1:
        return refuse("norm-weight-shape", "two tensors are multiplied with it")
    return constant(*numbers)(match) or row_wise(*tensors)(match)


def _positive(match: Match):
    if "share" in match.bound and not number(match, "share") > 0:
        return "the share of the norm is not positive"
    return None


def _arguments(match: Match):
    tensors, numbers = _parts(match)
    share = number(match, "share") if "share" in numbers else 1.0
    scale = 1.0 / share
    for name in ("first", "second"):
        if name in numbers:
            scale *= number(match, name)
    weight = row(match, tensors[0]) if tensors else None
    return (match.bound["x"], weight, scale, number(match, "eps") / share, value(match.root).dtype)


_SIZES = ({}, {"first": 2.0}, {"first": (4,)},
          {"first": 2.0, "second": (4,)}, {"first": (4,), "second": 2.0})  # fmt: skip

PATTERN = Pattern(
    name="l2_norm",
    idioms=(*factors(normalized), *factors(divided), *shared_factors()),
    op=l2_norm,
    arguments=_arguments,
    conditions=(_weights_and_numbers, _positive),
    result=0,
    example=tuple(
        {"x": (2, 4), "eps": 0.5, **share, **sizes}
        for share in ({}, {"share": 0.5})
        for sizes in _SIZES
    ),
)
