# SPDX-License-Identifier: Apache-2.0
"""Queries and keys leave their projection rotated: in every spelling, forward and backward, with
tables that are computed once, not in every kernel that reads them; or for the reason that is given
not at all."""

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


def inputs(width=D, rows=(1, T)):
    """Tables that are no rotations: what holds is to hold whatever they are."""
    return randn(B, T, WIDTH).requires_grad_(), randn(*rows, width), randn(*rows, width)


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


ALL = part(rotate_half)  # where tables are as wide as heads
#: Spelling -> the function, how many columns of a head it turns, and whether there is a bias.
SPELLINGS = {
    "halves": (whole(rotate_half), D, True),
    "partial pairs": (part(rotate_every_two), D // 2, False),
    "all of a part": (ALL, D, False),
}


def layer(apply, bias=False, norm=nn.Identity):
    """Grouped queries and a residual."""
    return Attention(WIDTH, H, H // 2, head=D, turn=apply, norm=norm, bias=bias)


class Model(nn.Module):
    """Layers, in float64."""

    def __init__(self, layers, apply, bias=False):
        super().__init__()
        norms = (nn.Identity, *[nn.RMSNorm] * (layers - 1))
        each = (layer(apply, bias, norm) for norm in norms)
        self.layers = nn.ModuleList(each).double()

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


@pytest.mark.parametrize(("apply", "width", "bias"), SPELLINGS.values(), ids=SPELLINGS)
def test_values_and_gradients(apply, width, bias):
    """With a bias and behind a deferred norm: one value a column is permuted outside the kernel,
    one value a row is its own."""
    harness = check_gradients(Model(2, apply, bias), *inputs(width))
    assert harness.counts["rotary"] == 4
    assert not count(harness.graph, rotate_heads)
    heads = [site.program for site in harness.fused if site.program.head]
    assert [p.head for p in heads] == [D] * 4
    assert all([o.kind for o in p.operands][-2:] == ["table"] * 2 for p in heads)
    assert count(harness.graph, KEEP) == 2  # they are made once, in the forward pass
    forward, backward = harness.parts
    assert (count(forward, KEEP), count(backward, KEEP)) == (2, 0)
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


def test_in_16_bits_what_is_stored_is_what_is_read():
    """Rotated in float32 by tables in float32, rounded once, as ModernBERT's."""

    def wide(x, cos, sin):
        return whole(rotate_half)(x.float(), cos, sin).to(x.dtype)

    x, cos, sin = (t.detach().float() for t in inputs())
    model = Model(1, wide).bfloat16()
    harness = check(model, x.bfloat16(), cos, sin)
    programs = [site.program for site in harness.fused if site.program.head]
    assert [p.stores[0].dtype for p in programs] == ["bfloat16"] * 2
    assert {o.dtype for p in programs for o in p.operands} == {"float32"}


def test_unfused_nothing_is_left_of_it():
    """No tables, and the same kernels as without the rewrite; Phi-3's, of all of a part, are laid
    out as if they were of the whole: what is joined with nothing is."""
    graphs = [
        check(Model(1, whole(rotate_half)), *inputs(), disable=disabled)
        for disabled in (("fuse",), ("fuse", "heads"))
    ]
    (left, right) = (harness.ops() for harness in graphs)
    assert not left[str(KEEP)]
    views = {op for op in {*left, *right} if "view" in op or "permute" in op or "alias" in op}
    assert {k: n for k, n in left.items() if k not in views} == {
        k: n for k, n in right.items() if k not in views
    }
    whole_, all_of_it = (check(Model(1, f), *inputs()).ops() for f in (whole(rotate_half), ALL))
    for op in ("aten.clone.default", "aten.cat.default"):
        assert whole_[op] == all_of_it[op]


def halves(q, cos, sin, joined=False):
    return rotate(q, cos, sin, cos.shape[-1] // 2, False, False, joined, q.dtype)


def of_rows(cut, joined=False, behind=lambda y: y):
    """A product, cut into heads, which are rotated."""
    return lambda x, w, cos, sin: behind(halves(cut(x @ w), cos, sin, joined))


def heads(z):
    return z.view(B, T, H, D)


def turned(z):
    return heads(z).permute(0, 2, 1, 3)


#: Code, what comes of it -> the function, the width of its product, the shape of its tables.
REFUSED = {
    "no-gemm, of an input": (
        lambda x, w, cos, sin: halves(heads(w.view(-1)[: B * T * H * D]), cos, sin), 4 * H * D,
        (T, 1, D),
    ),
    "no-gemm, no epilogue": (of_rows(lambda z: heads(z.cumsum(0))), H * D, (T, 1, D)),
    "no-gemm, no rows": (of_rows(lambda z: z.view(B, T, H, D, 2)[..., 0]), 2 * H * D, (T, 1, D)),
    "no-gemm, one a head": (of_rows(heads), H * D, (T, H, D)),
    "no-gemm, returned": (of_rows(turned, joined=True), H * D, (T, D)),
    "no-gemm, viewed": (of_rows(turned, True, lambda y: y.view(B * H, T, D) + 1), H * D, (T, D)),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_stays_says_why(why):
    function, width, tables = REFUSED[why]
    given = randn(B * T, WIDTH), randn(WIDTH, width), *randn(2, *tables)
    assert refused(rotate_rows, function, *given) == {why.partition(",")[0]}


@pytest.mark.parametrize(
    ("dtype", "gate", "why"),
    [(torch.float32, "auto", "float64-mixed"), (torch.float64, "never", "gate-never")],
)
def test_projections_that_stay_unfused(dtype, gate, why):
    """As one in float32 beside tables in float64."""
    factors = randn(B * T, WIDTH, dtype=dtype), randn(WIDTH, H * D, dtype=dtype)
    given = *factors, *randn(2, T, 1, D)
    assert refused(rotate_rows, of_rows(heads), *given, gate=gate) == {why}


def test_a_gradient_that_a_product_makes_is_rotated_back_behind_it():
    """In the backward pass nothing is rewritten: its tables would be made in the forward pass."""

    def function(x, w, cos, sin):
        q = whole(rotate_half)(x.view(B, T, H, D).transpose(1, 2), cos, sin)
        return q.transpose(1, 2).reshape(B, T, H * D) @ w

    given = randn(B, T, H * D).requires_grad_(), randn(H * D, WIDTH), *inputs()[1:]
    harness = check_gradients(function, *given)
    assert not count(harness.graph, KEEP)
    assert not harness.counts["rotary"]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("distance", [1, D // 2])
def test_rotations_back(distance, paired):
    """By tables that are no rotations."""
    width = D // 2 if paired else D

    def function(x, w, cos, sin):
        q = (x @ w).view(B, T, H, D)
        return rotate(q, cos, sin, distance, paired, True, False, q.dtype)

    args = randn(B * T, WIDTH), randn(WIDTH, H * D), randn(T, 1, width), randn(T, 1, width)
    graph = aten_graph(function, *args)
    assert not run_pass(rotate_rows, graph).report.refusals
    assert count(graph, rotate_heads) == 1
    got = torch.fx.Interpreter(graph.owning_module).run(*args)
    got = got[0] if isinstance(got, (tuple, list)) else got
    torch.testing.assert_close(got, function(*args), rtol=0, atol=1e-10)


def angles(x):
    steps = torch.arange(T, dtype=x.dtype, device=x.device)
    return steps[:, None] * (0.5 ** torch.arange(D, dtype=x.dtype, device=x.device))


def rotary(x, w):
    """Hugging Face's, in two layers."""
    cos, sin = (f(angles(x))[None, None] * 1.0 for f in (torch.cos, torch.sin))
    for _ in range(2):
        x = (x @ w) * cos + rotate_half(x @ w) * sin
    return x


def layers(x, w):
    """The same of the heads of rows, which is found; tables are cast, as Hugging Face's are."""
    cos, sin = (f(angles(x.float())).to(x.dtype) for f in (torch.cos, torch.sin))
    for _ in range(2):
        q = (x @ w).view(2, T, H, D).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        x = x + q.transpose(1, 2).reshape(x.shape)
    return x


@pytest.mark.parametrize(
    "disable", [[], ["heads"]], ids=["in epilogues", "in kernels of their own"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


STAY = {
    "full size": (lambda x, w: torch.sin(x @ w) * x, (64, D), {}),
    "read once": (lambda x, w: (x @ w) * torch.cos(angles(x)), (2, T, D), {}),
    "nothing is fused": (rotary, (2, H, T, D), {"gate": "never"}),
}


@pytest.mark.parametrize(("function", "shape", "options"), STAY.values(), ids=STAY)
def test_others_are_not_kept(function, shape, options):
    assert not count(check(function, randn(*shape), randn(D, D), **options).graph, KEEP)


def test_op_obeys_torchs_rules():
    torch.library.opcheck(KEEP, (randn(3, 4),))
