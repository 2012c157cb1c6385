# SPDX-License-Identifier: Apache-2.0
"""``silu(gate) * up`` in either order, raised to one op.

Before::

    a = F.silu(gate) * up          # or up * F.silu(gate), or gate * sigmoid(gate) * up

After::

    a = coda_inductor.swiglu_<digest>(gate, up)

Why it is valid: it is the definition. Source: Shazeer, "GLU Variants Improve Transformer" (arXiv
2002.05202), section 2.

What it enables: gate and up of one input share a tile (rule R6): neither is written to memory.

Refuses: gate and up of different shapes (a broadcast) or not floating; inputs of two dtypes with a
cast between them, because it decides in which dtype the user computes the gate.
"""

import torch
import torch.nn.functional as F

from coda_inductor import Match, Pattern, value
from coda_inductor.refusal import refuse


def swiglu(gate, up):
    return F.silu(gate) * up


def sigmoid_mul(gate, up):
    return (gate * torch.sigmoid(gate)) * up


def gradient(dy, gate, up):
    """As in Inductor: torch's own derivative of silu is a longer formula."""
    return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)


def _dtypes(match: Match):
    gate, up = value(match.bound["gate"]), value(match.bound["up"])
    if value(match.root).dtype != torch.promote_types(gate.dtype, up.dtype):
        return refuse("result-dtype", "the result has another dtype than gate and up")
    if gate.dtype != up.dtype and match.casts:
        return refuse("gate-dtype", "the gate is computed in another dtype than its input's")
    return None


PATTERN = Pattern(
    name="swiglu",
    meaning=swiglu,
    idioms=(swiglu, sigmoid_mul),
    gradient=gradient,
    conditions=(_dtypes,),
)
