# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding by tables of cosines and sines, raised to ``coda_inductor::rotate``.

Before::

    first, second = x[..., : d // 2], x[..., d // 2 :]           # Hugging Face's rotate_half
    y = x * cos + torch.cat((-second, first), -1) * sin          # Llama, Mistral, Qwen, Gemma

    first, second = x[..., ::2], x[..., 1::2]                    # neighbouring pairs
    y = x * cos + torch.stack((-second, first), -1).flatten(-2) * sin      # Cohere, GPT-J, GLM

    first, second = x.chunk(2, -1)                               # one angle a pair: GPT-OSS, vLLM
    y = torch.cat((first * c - second * s, second * c + first * s), -1)
    y = torch.cat((first * c + second * s, second * c - first * s), -1)    # back: nanochat

    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)          # torchtune, gpt-fast
    y = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)

    y = torch.cat((rotated x[..., :w], x[..., w:]), -1)          # partial: GPT-NeoX, Phi, Nemotron

After::

    y = coda_inductor.rotate(x, cos, sin, distance, paired, inverse, joined, dtype_of(y))

Why it is valid: the same sum, place by place. A rotation is linear in x; its gradient is the
transposed map, whatever the tables hold.

What it enables (coda_inductor.rewrite.heads): a rotation never crosses the border of a head, so
that the epilogue of the projection that makes x rotates it.

Refuses: tables that want a gradient; tables of another width than what is rotated; pairs that are
not all of it; an input that is not floating.
"""

import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, number, rotation
from coda_inductor.semantic import rotate


def turned_halves(x, cos, sin, half):
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def turned_pairs(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def _forward(a, b, c, s):
    return a * c - b * s, b * c + a * s


def _back(a, b, c, s):
    return a * c + b * s, b * c - a * s


def _negated(a, b, c, s):
    return a * c + b * s, b * c + a * -s


def halves(x, c, s, half):
    return torch.cat(_forward(x[..., :half], x[..., half:], c, s), -1)


def halves_back(x, c, s_back, half):
    return torch.cat(_back(x[..., :half], x[..., half:], c, s_back), -1)


def halves_negated(x, c, s_back, half):
    return torch.cat(_negated(x[..., :half], x[..., half:], c, s_back), -1)


def pairs(x, c, s):
    return torch.stack(_forward(x[..., ::2], x[..., 1::2], c, s), -1).flatten(-2)


def pairs_back(x, c, s_back):
    return torch.stack(_back(x[..., ::2], x[..., 1::2], c, s_back), -1).flatten(-2)


def pairs_negated(x, c, s_back):
    return torch.stack(_negated(x[..., ::2], x[..., 1::2], c, s_back), -1).flatten(-2)


def partial_turned_halves(x, cos, sin, half, width):
    return torch.cat((turned_halves(x[..., :width], cos, sin, half), x[..., width:]), -1)


def partial_turned_pairs(x, cos, sin, width):
    return torch.cat((turned_pairs(x[..., :width], cos, sin), x[..., width:]), -1)


def partial_halves(x, c, s, half, width):
    return torch.cat((halves(x[..., :width], c, s, half), x[..., width:]), -1)


def partial_halves_beside(x, c, s, half, width):
    part = x[..., :width]
    return torch.cat((*_forward(part[..., :half], part[..., half:], c, s), x[..., width:]), -1)


def partial_pairs(x, c, s, width):
    return torch.cat((pairs(x[..., :width], c, s), x[..., width:]), -1)


def _tables(match: Match):
    """Cosines, sines, whether they hold one angle a pair, whether they turn back."""
    bound = match.bound
    if "cos" in bound:
        return bound["cos"], bound["sin"], False, False
    back = "s_back" in bound
    return bound["c"], bound["s_back" if back else "s"], True, back


def _arguments(match: Match):
    bound = match.bound
    cos, sin, paired, back = _tables(match)
    distance = int(number(match, "half")) if "half" in bound else 1
    joined = paired or "width" in bound  # laid out by a cat or a stack, else like x
    dtype = value(match.root).dtype
    return (bound["x"], cos, sin, distance, paired, back, joined, dtype)


def _numbers(match: Match):
    return constant(*(name for name in ("half", "width") if name in match.bound))(match)


def _shapes(match: Match):
    cos, sin, paired, _ = _tables(match)
    return rotation(match, cos, sin, paired=paired)


_EACH, _PAIRS, _BACK = (
    {"cos": (3, 4), "sin": (3, 4)},
    {"c": (3, 2), "s": (3, 2)},
    {"c": (3, 2), "s_back": (3, 2)},
)
_WHOLE = [{"x": (2, 3, 4), **tables} for tables in (_EACH, _PAIRS, _BACK)]
_PART = [{"x": (2, 3, 6), "width": 4, **tables} for tables in (_EACH, _PAIRS)]
PATTERN = Pattern(
    name="rotary",
    idioms=(
        *(partial_turned_halves, partial_turned_pairs),
        *(partial_halves, partial_halves_beside, partial_pairs),
        *(turned_halves, turned_pairs, halves, halves_back, halves_negated),
        *(pairs, pairs_back, pairs_negated),
    ),
    op=rotate,
    arguments=_arguments,
    conditions=(_numbers, _shapes),
    example=tuple(e | half for e in (*_WHOLE, *_PART) for half in ({"half": 2}, {})),
)
