# SPDX-License-Identifier: Apache-2.0
"""Queries and keys leave their projection rotated: in every spelling, forward and backward, with
tables that are computed once, not in every kernel that reads them; or, for a reason, not at all."""

import pytest
import torch
from checking import check, check_gradients, randn
from passes import aten_graph, refused, run_pass
from torch import nn
from zoo.idioms import rotate_every_two, rotate_half
from zoo.layers import Attention

from coda_inductor.rewrite.heads import rotate_rows
from coda_inductor.semantic.rotary import rotate, rotate_heads

KEEP = torch.ops.coda_inductor.keep.default
B, T, H, D, WIDTH = 2, 6, 4, 8, 24


def inputs(width):
    """Tables that are no rotations: what holds is to hold whatever they are."""
    return randn(B, T, WIDTH).requires_grad_(), *randn(2, 1, T, width)


def count(graph, target) -> int:
    return sum(node.target is target for node in graph.nodes)


def whole(turn):
    def function(x, cos, sin):
        return x * cos.unsqueeze(1) + turn(x) * sin.unsqueeze(1)

    return function


def part(turn):
    def function(x, cos, sin):
        width = cos.shape[-1]
        turned = whole(turn)(x[..., :width], cos, sin)
        return torch.cat([turned, x[..., width:]], dim=-1)

    return function


#: Spelling -> the function, how many columns of a head it turns, and whether there is a bias.
SPELLINGS = {
    "halves": (whole(rotate_half), D, True),
    "partial pairs": (part(rotate_every_two), D // 2, False),
}


class Model(nn.Module):
    """Two layers of grouped queries and a residual, in float64."""

    def __init__(self, **how):
        super().__init__()
        norms = nn.Identity, nn.RMSNorm
        each = (Attention(WIDTH, H, H // 2, head=D, norm=norm, **how) for norm in norms)
        self.layers = nn.ModuleList(each).double()

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


@pytest.mark.parametrize(("apply", "width", "bias"), SPELLINGS.values(), ids=SPELLINGS)
def test_values_and_gradients(apply, width, bias):
    """With a bias and behind a deferred norm: one value a column is permuted outside the kernel,
    one value a row is its own."""
    harness = check_gradients(Model(turn=apply, bias=bias), *inputs(width))
    assert harness.counts["rotary"] == 4
    assert not count(harness.graph, rotate_heads)
    heads = [site.program for site in harness.fused if site.program.head]
    assert [p.head for p in heads] == [D] * 4
    # They are made once, in the forward pass.
    assert [count(part, KEEP) for part in harness.parts] == [2, 0]
    kinds = [sorted(o.kind for o in program.operands) for program in heads[2:]]
    assert kinds == [["col", *["row"] * 2 * bias, "table", "table"]] * 2


def test_infinities_beside_what_is_rotated():
    """What is copied is not multiplied with 0."""

    def gptj(x, w, bias, cos, sin):
        q, width = (x @ w + bias).view(B, T, H, D), cos.shape[-1]
        turned = (
            q[..., :width] * cos[:, :, None] + rotate_every_two(q[..., :width]) * sin[:, :, None]
        )
        return torch.cat([turned, q[..., width:]], dim=-1)

    bias = randn(H * D)
    bias[4::D], bias[5::D] = torch.inf, -torch.inf
    args = randn(B, T, WIDTH), randn(WIDTH, H * D), bias, *inputs(D // 2)[1:]
    assert check(gptj, *args).counts["rotary"] == 1


def halves(q, cos, sin, joined=False):
    return rotate(q, cos, sin, cos.shape[-1] // 2, False, False, joined, q.dtype)


def of_rows(cut, joined=False, behind=lambda y: y):
    """A product, cut into heads, which are rotated."""
    return lambda x, w, cos, sin: behind(halves(cut(x @ w), cos, sin, joined))


def heads(z):
    return z.view(B, T, H, D)


def turned(z):
    return heads(z).permute(0, 2, 1, 3)


#: What comes of a product -> the function, the width of the product, the shape of its tables.
REFUSED = {
    "no epilogue": (of_rows(lambda z: heads(z.cumsum(0))), H * D, (T, 1, D)),
    "no rows": (of_rows(lambda z: z.view(B, T, H, D, 2)[..., 0]), 2 * H * D, (T, 1, D)),
    "one table a head": (of_rows(heads), H * D, (T, H, D)),
    "returned": (of_rows(turned, joined=True), H * D, (T, D)),
    "viewed": (of_rows(turned, True, lambda y: y.view(B * H, T, D) + 1), H * D, (T, D)),
}


@pytest.mark.parametrize(("function", "width", "tables"), REFUSED.values(), ids=REFUSED)
def test_what_stays_says_why(function, width, tables):
    given = randn(B * T, WIDTH), randn(WIDTH, width), *randn(2, *tables)
    assert refused(rotate_rows, function, *given) == {"no-gemm"}


def test_a_projection_in_float32_beside_tables_in_float64_stays_unfused():
    factors = randn(B * T, WIDTH, dtype=torch.float32), randn(WIDTH, H * D, dtype=torch.float32)
    assert refused(rotate_rows, of_rows(heads), *factors, *randn(2, T, 1, D)) == {"float64-mixed"}


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("distance", [1, D // 2])
def test_rotations_back(distance, paired):
    width = D // 2 if paired else D

    def function(x, w, cos, sin):
        q = (x @ w).view(B, T, H, D)
        return rotate(q, cos, sin, distance, paired, True, False, q.dtype)

    args = randn(B * T, WIDTH), randn(WIDTH, H * D), *randn(2, T, 1, width)
    graph = aten_graph(function, *args)
    assert not run_pass(rotate_rows, graph).report.refusals
    assert count(graph, rotate_heads) == 1
    got = torch.fx.Interpreter(graph.owning_module).run(*args)
    got = got[0] if isinstance(got, (tuple, list)) else got
    torch.testing.assert_close(got, function(*args), rtol=0, atol=1e-10)


def angles(x):
    steps = torch.arange(T, dtype=x.dtype, device=x.device)
    return steps[:, None] * (0.5 ** torch.arange(D, dtype=x.dtype, device=x.device))


def layers(x, w):
    """Hugging Face's, in two layers, with tables that are cast."""
    cos, sin = (f(angles(x.float())).to(x.dtype) for f in (torch.cos, torch.sin))
    for _ in range(2):
        q = (x @ w).view(2, T, H, D).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        x = x + q.transpose(1, 2).reshape(x.shape)
    return x


@pytest.mark.parametrize(("disable", "dtype"), [([], torch.bfloat16), (["heads"], torch.float32)])
def test_rotations_that_are_found(dtype, disable):
    """Their definition reads tables in the dtype that it computes in, or turned. In inference those
    of epilogues are made of the others, which nothing else reads then."""
    args = randn(2, T, H * D, dtype=dtype), 0.1 * randn(H * D, H * D, dtype=dtype)
    assert count(check(layers, *args, disable=disable).graph, KEEP) == 2
    harness = check_gradients(layers, args[0].requires_grad_(), args[1], disable=disable)
    assert any("rotate" in str(n.target) for n in harness.raised.nodes)
    slow = (torch.ops.aten.cos.default, torch.ops.aten.sin.default)
    forward, backward = harness.parts
    assert sum(n.target in slow for n in forward.nodes) == 2
    assert not any(n.target in slow or n.target is KEEP for n in backward.nodes)
    assert count(forward, KEEP) == (2 if disable else 4)


@pytest.mark.parametrize(("function", "shape"), [
    (lambda x, w: torch.sin(x @ w) * x, (64, D)), (lambda x, w: (x @ w) * angles(x).cos(), (T, D)),
], ids=["full size", "read once"])  # fmt: skip
def test_others_are_not_kept(function, shape):
    assert not count(check(function, randn(2, *shape), randn(D, D)).graph, KEEP)


def test_op_obeys_torchs_rules():
    torch.library.opcheck(KEEP, (randn(3, 4),))
