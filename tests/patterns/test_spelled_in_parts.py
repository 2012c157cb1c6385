# SPDX-License-Identifier: Apache-2.0
"""Idioms of users that spell a part of what is read as one op, or columns of unknown number."""

from __future__ import annotations

import pytest
import torch
from checking import check, randn
from gates import write

from coda_inductor import patterns
from coda_inductor.errors import PatternError

T, D = 5, 8
TEXT = '''
"""A spelling of a rotation."""
import torch
from coda_inductor import Pattern, value
from coda_inductor.semantic import rotate

def idiom(x, c, s):
{body}

def arguments(match):
    x, c, s = (match.bound[name] for name in "xcs")
    return x, c, s, {distance}, True, False, True, value(match.root).dtype

PATTERN = Pattern(
    name="mine", idioms=(idiom,), op=rotate, arguments=arguments,
    example={{"x": (2, 3, 4), "c": (3, 2), "s": (3, 2)}},
)
'''
PAIRS = """
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(2)
"""
CHUNKS = """
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)
"""
ROWS = """
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat((a * c - b * s, b * c + a * s), -1)
"""


def of_pairs(x, c, s):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(2)


#: A process for each file would take seconds.
pytestmark = pytest.mark.usefixtures("prove_here")


def raised(function, body, distance, folder):
    path = write(folder, TEXT.format(body=body.strip("\n"), distance=distance))
    (pattern,) = patterns.load_file(path)
    given = randn(2, T, D), randn(T, D // 2), randn(T, D // 2)
    harness = check(function, *given, patterns=[path], disable=["rotary"])
    return sum(node.target is pattern.op for node in harness.raised.nodes)


def test_a_flattened_stack_by_a_dimension_from_the_first(tmp_path):
    assert raised(of_pairs, PAIRS, 1, tmp_path) == 1


@pytest.mark.parametrize("body", [CHUNKS, ROWS], ids=["chunk", "unbind"])
def test_columns_whose_number_an_idiom_does_not_know(body, tmp_path):
    """How wide they are is not written there: that is said, and nothing fails."""
    with pytest.raises(PatternError, match=r"getitem.* which the matcher cannot read"):
        raised(of_pairs, body, D // 2, tmp_path)
