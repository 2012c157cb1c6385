# SPDX-License-Identifier: Apache-2.0
"""Functions that are named as torch's, and are others: custom ops and functions of the user's."""

from __future__ import annotations

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


@pytest.mark.parametrize("root", [own_rsqrt, own_rsqrt.default, rsqrt])
def test_a_root_of_somebody_elses(root):
    assert raised(check(lambda x: norm(root, x), randn(4, 16)), rms_norm) == 0


@pytest.mark.parametrize("chunk", [own_chunk, own_chunk.default])
def test_parts_of_somebody_elses(chunk):
    def rotary(x, cos, sin):
        first, second = chunk(x, 2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    assert raised(check(rotary, randn(4, 6, 16), randn(6, 8), randn(6, 8)), rotate) == 0


def test_probabilities_of_somebody_elses():
    def function(logits, index):
        return own_gather(F.log_softmax(logits, -1), -1, index[:, None])

    assert raised(check(function, randn(4, 9), torch.arange(4)), cross_entropy) == 0
