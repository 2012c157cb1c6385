# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of neighbouring pairs whose result stands as halves, raised to
``coda_inductor::rotate_apart``.

Before (DeepSeek-V3 and what follows it, ``rope_interleave``)::

    first, second = x[..., ::2], x[..., 1::2]                    # transformers 5.23
    y = torch.cat((first * c - second * s, second * c + first * s), -1)

    z = x.view(*lead, d // 2, 2).transpose(-1, -2).reshape(*lead, d)      # before, and DeepSeek's
    y = z * cos + torch.cat((-z[..., d // 2 :], z[..., : d // 2]), -1) * sin

After::

    y = coda_inductor.rotate_apart(x, cos, sin, paired, dtype_of(y))

which is the rotation of pairs, and a view of what it makes: first all first columns, then all
second ones.

Why it is valid: the same sum, place by place; both ways of standing are one permutation of columns,
which may be done after the rotation as well as before.

What it enables: as ``rotary``, of which the rotation is one from then on: where all is permuted,
nothing beside it is moved in a kernel of its own (attention's queries are put together anyway).

Refuses: as ``rotary``. Files are read in the order of their names, and this one before ``rotary``,
whose rotation of halves is part of the second spelling.
"""

import torch

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, rotation
from coda_inductor.semantic import rotate_apart


def pairs_as_halves(x, c, s):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def turned_as_halves(x, cos, sin, half):
    z = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return z * cos + torch.cat((-z[..., half:], z[..., :half]), -1) * sin


def _tables(match: Match):
    """Cosines, sines, whether they hold one angle a pair."""
    bound = match.bound
    paired = "c" in bound
    return bound["c" if paired else "cos"], bound["s" if paired else "sin"], paired


def _arguments(match: Match):
    return (match.bound["x"], *_tables(match), value(match.root).dtype)


def _numbers(match: Match):
    return constant("half")(match) if "half" in match.bound else None


def _shapes(match: Match):
    cos, sin, paired = _tables(match)
    return rotation(match, cos, sin, paired=paired)


PATTERN = Pattern(
    name="interleaved_rotary",
    idioms=(pairs_as_halves, turned_as_halves),
    op=rotate_apart,
    arguments=_arguments,
    conditions=(_numbers, _shapes),
    example=(
        {"x": (2, 3, 4), "c": (3, 2), "s": (3, 2)},
        {"x": (2, 3, 4), "cos": (3, 4), "sin": (3, 4), "half": 2},
    ),
)
