# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding by tables of cosines and sines, raised to ``coda_inductor::rotate``.

Before::

    first, second = x[..., : d // 2], x[..., d // 2 :]           # Hugging Face's rotate_half
    y = x * cos + torch.cat((-second, first), -1) * sin          # Llama, Mistral, Qwen, Gemma

    first, second = x[..., ::2], x[..., 1::2]                    # neighbouring pairs
    y = x * cos + torch.stack((-second, first), -1).flatten(-2) * sin      # Cohere, GPT-J, GLM

    y = torch.cat((rotated x[..., :w], x[..., w:]), -1)          # partial: GPT-NeoX, Phi, Nemotron

After::

    y = coda_inductor.rotate(x, cos, sin, distance, False, partial, dtype_of(y))

Why it is valid: the same sum, place by place. A rotation is linear in x; its gradient is the
transposed map, whatever the tables hold.

What it enables (coda_inductor.rewrite.rotary): a rotation never crosses the border of a head, so
that the epilogue of the projection that makes x rotates it.

Refuses: tables that want a gradient; tables of another width than what is rotated; pairs that are
not all of it; an input that is not floating.
"""

import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, number
from coda_inductor.refusal import refuse
from coda_inductor.semantic import rotate


def halves(x, cos, sin, half):
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


def pairs(x, cos, sin):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def partial_halves(x, cos, sin, half, width):
    return torch.cat((halves(x[..., :width], cos, sin, half), x[..., width:]), -1)


def partial_pairs(x, cos, sin, width):
    return torch.cat((pairs(x[..., :width], cos, sin), x[..., width:]), -1)


def _distance(match: Match) -> int:
    return int(number(match, "half")) if "half" in match.bound else 1


def _arguments(match: Match):
    x, cos, sin = (match.bound[name] for name in ("x", "cos", "sin"))
    joined, dtype = "width" in match.bound, value(match.root).dtype
    return (x, cos, sin, _distance(match), False, joined, dtype)


def _numbers(match: Match):
    return constant(*(name for name in ("half", "width") if name in match.bound))(match)


def _shapes(match: Match):
    x, cos, sin, y = (
        value(n) for n in (*(match.bound[name] for name in ("x", "cos", "sin")), match.root)
    )
    if not all(isinstance(t, torch.Tensor) for t in (x, cos, sin, y)):
        return refuse("not-recorded", "the shape of an input is unknown")
    if x.shape != y.shape or not all(t.is_floating_point() for t in (x, cos, sin)):
        said = f"the result {tuple(y.shape)} is not shaped like the input {tuple(x.shape)}"
        return refuse("rotary-shape", said)
    if cos.requires_grad or sin.requires_grad:
        return refuse("turns-gradient", "a gradient of the tables is wanted")
    width = min(int(number(match, "width")), x.shape[-1]) if "width" in match.bound else x.shape[-1]
    half = int(number(match, "half")) if "half" in match.bound else width // 2
    if cos.shape[-1] != width or sin.shape[-1] != width or 2 * half != width:
        said = f"tables of {cos.shape[-1]} and {sin.shape[-1]} columns for {width} that are rotated"
        return refuse("rotary-width", said)
    return None


_TABLES = {"cos": (3, 4), "sin": (3, 4)}
PATTERN = Pattern(
    name="rotary",
    idioms=(partial_halves, partial_pairs, halves, pairs),
    op=rotate,
    arguments=_arguments,
    conditions=(_numbers, _shapes),
    example=(
        {"x": (2, 3, 4), **_TABLES, "half": 2},
        {"x": (2, 3, 4), **_TABLES},
        {"x": (2, 3, 6), **_TABLES, "half": 2, "width": 4},
        {"x": (2, 3, 6), **_TABLES, "width": 4},
    ),
)
