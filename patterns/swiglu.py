# SPDX-License-Identifier: Apache-2.0
"""``silu(gate) * up`` in either order, raised to ``coda_inductor::swiglu``.

Before::

    a = F.silu(gate) * up          # or up * F.silu(gate), or gate * sigmoid(gate) * up

After::

    a = coda_inductor.swiglu(gate, up)

Why it is valid: it is the definition, computed in float32.

What it enables: gate and up projections of one input meet in one tile (rule R6), so that neither
is written to memory.

Refuses: gate and up of different shapes (a broadcast) or not floating; inputs of two dtypes with a
cast between them, for the op computes the gate in its input's dtype.
"""

import sympy
import torch
import torch.nn.functional as F

from coda_inductor import Match, Pattern, value
from coda_inductor.semantic import swiglu


def silu_mul(gate, up):
    return F.silu(gate) * up


def sigmoid_mul(gate, up):
    return (gate * torch.sigmoid(gate)) * up


def _arguments(match: Match):
    return (match.bound["gate"], match.bound["up"])


def _shapes(match: Match):
    gate, up = value(match.bound["gate"]), value(match.bound["up"])
    if not isinstance(gate, torch.Tensor) or not isinstance(up, torch.Tensor):
        return "gate or up is not a tensor"
    if gate.shape != up.shape:
        return f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape"
    if not gate.is_floating_point() or not up.is_floating_point():
        return "gate or up is not floating"
    if value(match.root).dtype != torch.promote_types(gate.dtype, up.dtype):
        return "the result has another dtype than gate and up"
    if gate.dtype != up.dtype and match.casts:
        return "the gate is computed in another dtype than its input's"
    return None


def _identities():
    g, u = sympy.symbols("g u", real=True)
    sigmoid = 1 / (1 + sympy.exp(-g))
    return [(g / (1 + sympy.exp(-g)) * u, g * sigmoid * u)]


PATTERN = Pattern(
    name="swiglu",
    idioms=(silu_mul, sigmoid_mul),
    op=swiglu,
    arguments=_arguments,
    conditions=(_shapes,),
    identities=_identities,
    example={"gate": (4, 16), "up": (4, 16)},
    rules=("R6",),
)
