# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding by tables of cosines and sines, raised to ``coda_inductor::rotate``.

Before::

    first, second = x[..., : d // 2], x[..., d // 2 :]           # Hugging Face's rotate_half
    y = x * cos + torch.cat((-second, first), -1) * sin          # Llama, Mistral, Qwen, Gemma

    first, second = x[..., ::2], x[..., 1::2]                    # neighboring pairs
    y = x * cos + torch.stack((-second, first), -1).flatten(-2) * sin      # Cohere, GPT-J, GLM

    first, second = x.chunk(2, -1)                               # one angle per pair: GPT-OSS, vLLM
    y = torch.cat((first * c - second * s, second * c + first * s), -1)

    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)          # torchtune, gpt-fast
    y = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)

    y = torch.cat((rotated x[..., :w], x[..., w:]), -1)          # partial: GPT-NeoX, Phi, Nemotron

After::

    y = coda_inductor.rotate(x, cos, sin, distance, paired, inverse, joined, dtype_of(y))

Why it is valid: the same sum, element by element. A rotation is linear in x; its gradient is the
transposed map, for any tables.

What it enables (coda_inductor.rewrite.heads): a rotation stays within a head, so the epilogue of
the projection that computes x can rotate it.

Refuses: tables that need a gradient; tables of another width than what is rotated; pairs that do
not cover all of it; an input that is not floating.
"""

import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, number
from coda_inductor.refusal import refuse
from coda_inductor.semantic.rotary import rotate


def turned_halves(x, cos, sin, half):
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def turned_pairs(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def _products(a, b, c, s):
    return a * c - b * s, b * c + a * s


def halves(x, c, s, half):
    return torch.cat(_products(x[..., :half], x[..., half:], c, s), -1)


def pairs(x, c, s):
    return torch.stack(_products(x[..., ::2], x[..., 1::2], c, s), -1).flatten(-2)


def partial_turned_halves(x, cos, sin, half, width):
    return torch.cat((turned_halves(x[..., :width], cos, sin, half), x[..., width:]), -1)


def partial_turned_pairs(x, cos, sin, width):
    return torch.cat((turned_pairs(x[..., :width], cos, sin), x[..., width:]), -1)


def _tables(match: Match):
    """Cosines, sines, and whether they have one angle per pair."""
    paired = "c" in match.bound
    return match.bound["c" if paired else "cos"], match.bound["s" if paired else "sin"], paired


def _arguments(match: Match):
    bound = match.bound
    cos, sin, paired = _tables(match)
    distance = int(number(match, "half")) if "half" in bound else 1
    joined = paired or "width" in bound  # layout of a cat or a stack, else like x
    dtype = value(match.root).dtype
    return (bound["x"], cos, sin, distance, paired, False, joined, dtype)


def _shapes(match: Match):
    cos, sin, paired = _tables(match)
    x, y, *tables = (value(node) for node in (match.bound["x"], match.root, cos, sin))
    if not all(isinstance(t, torch.Tensor) for t in (x, y, *tables)):
        return refuse("idiom-form", "the shape of an input is unknown")
    if x.shape != y.shape or not all(t.is_floating_point() for t in (x, *tables)):
        text = f"the result {tuple(y.shape)} is not shaped like the input {tuple(x.shape)}"
        return refuse("idiom-form", text)
    if any(t.requires_grad for t in tables):
        return refuse("idiom-form", "the tables need a gradient")
    width = min(int(number(match, "width")), x.shape[-1]) if "width" in match.bound else x.shape[-1]
    half = int(number(match, "half")) if "half" in match.bound else width // 2
    have = [t.shape[-1] for t in tables]
    if any(count != (half if paired else width) for count in have) or 2 * half != width:
        text = f"tables of {have[0]} and {have[1]} columns for {width} rotated ones"
        return refuse("idiom-form", text)
    return None


_EACH, _PAIRS = {"cos": (3, 4), "sin": (3, 4)}, {"c": (3, 2), "s": (3, 2)}
_EXAMPLES = (
    {"x": (2, 3, 4), **_EACH},
    {"x": (2, 3, 4), **_PAIRS},
    {"x": (2, 3, 6), "width": 4, **_EACH},
)
PATTERN = Pattern(
    name="rotary",
    idioms=(
        *(partial_turned_halves, partial_turned_pairs),
        *(turned_halves, turned_pairs, halves, pairs),
    ),
    op=rotate,
    arguments=_arguments,
    conditions=(constant("half", "width"), _shapes),
    example=tuple(e | half for e in _EXAMPLES for half in ({"half": 2}, {})),
)
