# SPDX-License-Identifier: Apache-2.0
"""Rotary tables are computed once, not in every kernel that reads them."""

from __future__ import annotations

import pytest
import torch
from checking import check, check_gradients, randn
from idioms import rotate_half

KEEP = torch.ops.coda_inductor.keep.default
HEADS, T, D = 8, 6, 4


def angles(x):
    steps = torch.arange(T, dtype=x.dtype, device=x.device)
    return steps[:, None] * (0.5 ** torch.arange(D, dtype=x.dtype, device=x.device))


def rotary(x, w):
    """Hugging Face's, in two layers."""
    cos, sin = (f(angles(x))[None, None] * 1.0 for f in (torch.cos, torch.sin))
    for _ in range(2):
        x = (x @ w) * cos + rotate_half(x @ w) * sin
    return x


def heads(x, w):
    """The same of the heads of rows, which is found; tables are cast, as Hugging Face's are."""
    cos, sin = (f(angles(x.float())).to(x.dtype) for f in (torch.cos, torch.sin))
    for _ in range(2):
        q = (x @ w).view(2, T, HEADS, D).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        x = x + q.transpose(1, 2).reshape(x.shape)
    return x


def kept(graph) -> int:
    return sum(node.target is KEEP for node in graph.nodes)


@pytest.mark.parametrize(
    "disable", [[], ["heads"]], ids=["in epilogues", "in kernels of their own"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotations_that_are_found(dtype, disable):
    """Their definition reads tables in the dtype that it computes in, or turned. In inference those
    of epilogues are made of the others, which nothing else reads then."""
    args = randn(2, T, HEADS * D, dtype=dtype), 0.1 * randn(HEADS * D, HEADS * D, dtype=dtype)
    assert kept(check(heads, *args, disable=disable).graph) == 2
    harness = check_gradients(heads, args[0].requires_grad_(), args[1], disable=disable)
    assert any("rotate" in str(n.target) for n in harness.raised.nodes)
    slow = (torch.ops.aten.cos.default, torch.ops.aten.sin.default)
    forward, backward = harness.parts
    assert sum(n.target in slow for n in forward.nodes) == 2
    assert not any(n.target in slow or n.target is KEEP for n in backward.nodes)
    assert kept(forward) == (2 if disable else 4)


STAY = {
    "full size": (lambda x, w: torch.sin(x @ w) * x, (64, D), {}),
    "read once": (lambda x, w: (x @ w) * torch.cos(angles(x)), (2, T, D), {}),
    "nothing is fused": (rotary, (2, HEADS, T, D), {"gate": "never"}),
}


@pytest.mark.parametrize("name", STAY)
def test_others_are_not_kept(name):
    function, shape, options = STAY[name]
    assert not kept(check(function, randn(*shape), randn(D, D), **options).graph)


def test_op_obeys_torchs_rules():
    torch.library.opcheck(KEEP, (randn(3, 4),))
