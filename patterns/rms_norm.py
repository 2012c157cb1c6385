"""RMSNorm as users write it, raised to ``coda_inductor::rms_norm``.

Before::

    h = x.to(torch.float32)                       # Hugging Face, also without the casts
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * h.to(x.dtype)                    # weight absent, or on either side

    y = F.rms_norm(x, (d,), weight, eps)          # also nn.RMSNorm, eps given or None

After::

    y, rstd = coda_inductor.rms_norm(x, weight, eps, dtype_of(y))

Why it is valid: both sides are x * rsqrt(mean(x^2) + eps) * weight; the casts only say in which
precision. The op computes in float32 (float64 for float64), never less than the idiom did.

What it enables (coda_inductor.rewrite.norms): rule R1, (D_r X) W = D_r (X W): the row scale rstd
moves past the GEMM that follows; rule R2: its statistics leave the GEMM in front as partials.

Refuses: statistics not over the whole last dimension; eps that is not a number (a tensor, or read
from one); a weight that is not one value a column; a result whose shape is not x's; an input
that is not floating.
"""

import sympy
import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.semantic import rms_norm


def weighted(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def weighted_sqrt(x, weight, eps):
    return weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def bare(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def bare_sqrt(x, eps):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def functional(x, weight, eps):
    return torch.rms_norm(x, (1,), weight, eps)


def _number(eps):
    """What Dynamo recorded for a float: itself, or with dynamic shapes a symbol with a value."""
    return value(eps) if isinstance(eps, torch.fx.Node) else eps


def _epsilon(match: Match) -> float:
    eps = _number(match.bound["eps"])
    if eps is not None:
        return float(eps)  # of a symbol: adds a guard, so that another eps is another graph
    # eps=None means the epsilon of the compute dtype: float32's for half types (measured).
    dtype = value(match.bound["x"]).dtype
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _arguments(match: Match):
    weight = match.bound.get("weight")
    return (match.bound["x"], weight, _epsilon(match), value(match.root).dtype)


def _constant_eps(match: Match):
    if match.bound["eps"] is None:
        return None
    eps = _number(match.bound["eps"])
    known = isinstance(eps, torch.SymFloat) and eps.node.has_hint()
    return None if known or isinstance(eps, (int, float)) else "eps is not a constant"


def _shapes(match: Match):
    x, result = value(match.bound["x"]), value(match.root)
    if not isinstance(x, torch.Tensor) or not isinstance(result, torch.Tensor):
        return "the shape of the input is unknown"
    if not x.is_floating_point():
        return f"the input is {x.dtype}, not a floating type"
    if result.shape != x.shape:
        return f"the result {tuple(result.shape)} is not shaped like the input {tuple(x.shape)}"
    weight = match.bound.get("weight")
    if weight is None:
        return None
    w = value(weight)
    if not isinstance(w, torch.Tensor) or w.shape != x.shape[-1:]:
        return "the weight is not one value a column"
    return None


def _identities():
    """Three columns stand for all: the op's definition against the idiom, symbolically."""
    x = sympy.symbols("x0:3", real=True)
    w = sympy.symbols("w0:3", real=True)
    eps = sympy.Symbol("eps", positive=True)
    rstd = 1 / sympy.sqrt(sum(v**2 for v in x) / 3 + eps)
    return [(wi * (xi * rstd), xi * rstd * wi) for xi, wi in zip(x, w, strict=True)]


PATTERN = Pattern(
    name="rms_norm",
    idioms=(functional, weighted, weighted_sqrt, bare, bare_sqrt),
    op=rms_norm,
    arguments=_arguments,
    conditions=(_constant_eps, _shapes),
    result=0,
    identities=_identities,
    example={"x": (4, 16), "weight": (16,), "eps": 1e-5},
    rules=("R1", "R2", "R3", "R4"),
)
