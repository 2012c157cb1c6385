# SPDX-License-Identifier: Apache-2.0
"""Functions that are named as torch's, and are others: custom ops and functions of the user's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from checking import check, raised, randn

from coda_inductor.semantic import cross_entropy, rms_norm, rotate

LIBRARY = torch.library.Library("coda_tests_names", "DEF")
EPS = 1e-6


def define(schema, function):
    """An op of ours; ``torch.ops.coda_tests_names.<name>``."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"coda_tests_names::{name}", function, lib=LIBRARY)
    return getattr(torch.ops.coda_tests_names, name)


own_rsqrt = define("rsqrt(Tensor x) -> Tensor", lambda x: 2 * torch.rsqrt(x))
own_chunk = define(
    "chunk(Tensor x, int n, int dim) -> Tensor[]",
    lambda x, n, dim: [part.clone() for part in reversed(x.chunk(n, dim))],
)
own_gather = define(
    "gather(Tensor x, int dim, Tensor index) -> Tensor",
    lambda x, dim, index: 2 * x.gather(dim, index),
)


@torch.compiler.allow_in_graph
def rsqrt(x):
    return 3 * torch.rsqrt(x)


def norm(root, x):
    return x * root(x.pow(2).mean(-1, keepdim=True) + EPS)


def rotary(chunk):
    def function(x):
        (first, second), cos, sin = chunk(x, 2, -1), x[0, 0, :8].cos(), x[0, 0, :8].sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return function


def likelihood(x):
    index = torch.zeros(4, 6, 1, dtype=torch.long)
    return own_gather(F.log_softmax(x, -1), -1, index)


FUNCTIONS = [
    *(functools.partial(norm, root) for root in (own_rsqrt, own_rsqrt.default, rsqrt)),
    *(rotary(chunk) for chunk in (own_chunk, own_chunk.default)),
    likelihood,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_somebody_elses_is_no_idiom(function):
    harness = check(function, randn(4, 6, 16))
    assert not any(raised(harness, op) for op in (rms_norm, rotate, cross_entropy))
