# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding written with complex numbers, raised to ``coda_inductor::rotate_pairs``.

Before (torchtitan, Meta's Llama; x (B, T, H, D), turns complex)::

    z = torch.view_as_complex(x.float().reshape(B, T, H, -1, 2))
    y = torch.view_as_real(z * turns).flatten(3)

After::

    y = coda_inductor.rotate_pairs(x, turns, dtype_of(y))

Why it is valid: (a + ib)(c + is) = (ac - bs) + i(as + bc); the gradient rotates by the conjugate.

What it enables: Inductor generates no code for complex numbers and runs them op by op, each through
memory; the real form is one elementwise kernel, with the casts around it.

Refuses: other pairs of columns than neighbors; turns that need a gradient.
"""

import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.refusal import refuse
from coda_inductor.semantic.rotary import rotate_pairs


def complex_numbers(x, turns):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * turns).flatten(-2)


def _shapes(match: Match):
    x, turns, y = (value(n) for n in (match.bound["x"], match.bound["turns"], match.root))
    if not all(isinstance(t, torch.Tensor) for t in (x, turns, y)):
        return refuse("idiom-form", "the shape of an input is unknown")
    if not x.is_floating_point() or not turns.is_complex():
        return refuse("idiom-form", f"it multiplies {x.dtype} and {turns.dtype}")
    if x.shape != y.shape:
        text = f"the result {tuple(y.shape)} is not shaped like the input {tuple(x.shape)}"
        return refuse("idiom-form", text)
    if turns.requires_grad:
        return refuse("idiom-form", "the turns need a gradient")
    return None


PATTERN = Pattern(
    name="rotary_complex",
    idioms=(complex_numbers,),
    op=rotate_pairs,
    arguments=lambda match: (match.bound["x"], match.bound["turns"], value(match.root).dtype),
    conditions=(_shapes,),
    example={"x": (2, 3, 1, 4), "turns": torch.ones(1, 3, 1, 2, dtype=torch.complex128)},
)
