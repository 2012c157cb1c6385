# SPDX-License-Identifier: Apache-2.0
"""Queries and keys that are cut out of a packed projection leave it rotated, and what is beside
them as it is; what stays unfused is as it was."""

from __future__ import annotations

import functools

import passes
import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from passes import aten_graph, codes, run_pass
from rotating import WIDTH, B, D, H, Stack, T, count, inputs
from torch import nn

from coda_inductor.program.reference import run as run_reference
from coda_inductor.rewrite.head_parts import _regular
from coda_inductor.rewrite.heads import rotate_rows
from coda_inductor.semantic.rotary import rotate, rotate_heads


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary(x, cos, sin):
    """All columns of the tables' width, the others are copied."""
    width = cos.shape[-1]
    part = x[..., :width]
    turned = part * cos.unsqueeze(1) + rotate_half(part) * sin.unsqueeze(1)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def sliced(y, b, keys=H):
    """Phi-3."""
    ends = H * D, (H + keys) * D
    parts = y[..., : ends[0]], y[..., ends[0] : ends[1]], y[..., ends[1] :]
    return [p.view(b, T, -1, D).transpose(1, 2) for p in parts]


def split(y, b, keys=H):
    """The layout of gpt-fast and ChatGLM."""
    parts = y.split([H * D, keys * D, keys * D], -1)
    return [p.view(b, T, -1, D).transpose(1, 2) for p in parts]


def by_turns(y, b):
    """GPT-NeoX: queries, keys and values of one head beside each other."""
    return y.view(b, T, H, 3 * D).transpose(1, 2).chunk(3, -1)


def unbound(y, b):
    """ModernBERT."""
    return y.view(b, T, 3, H, D).transpose(3, 1).unbind(2)


SPELLINGS = {
    "sliced": (sliced, H), "split": (split, H), "by turns": (by_turns, H), "unbound": (unbound, H),
    "grouped": (functools.partial(sliced, keys=H // 2), H // 2),
    "one key": (functools.partial(split, keys=1), 1),
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, cut, keys=H, bias=False, norm=False):
        super().__init__()
        self.cut, self.qkv = cut, nn.Linear(WIDTH, (H + 2 * keys) * D, bias)
        self.norm = nn.RMSNorm(WIDTH) if norm else nn.Identity()
        self.o = nn.Linear(H * D, WIDTH)

    def forward(self, x, cos, sin):
        q, k, v = self.cut(self.qkv(self.norm(x)), x.shape[0])
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Model(Stack):
    def __init__(self, cut, keys=H, layers=2, checkpointed=False, **how):
        made = (Layer(cut, keys, norm=i > 0, **how) for i in range(layers))
        super().__init__(made, checkpointed)


def rotations(harness):
    """Programs that rotate: with two tables and the mask of what they rotate."""
    found = [site.program for site in harness.fused if site.program.head]
    for program in found:
        kinds = [o.kind for o in program.operands]
        assert kinds.count("table") == 2
        assert "row" in kinds
        assert len(program.stores) == 1
    return found


@pytest.mark.parametrize("width", [D, D // 2], ids=["whole", "partial"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_values_and_gradients(spelling, width):
    cut, keys = SPELLINGS[spelling]
    harness = check_gradients(Model(cut, keys), *inputs(width))
    assert harness.counts["rotary"] == len(rotations(harness)) == 2
    assert not count(harness.graph, rotate_heads)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_inference_of_own_positions(spelling):
    cut, keys = SPELLINGS[spelling]
    harness = check(Model(cut, keys), *inputs(rows=(B, T)))
    assert harness.counts["rotary"] == len(rotations(harness)) == 2


@pytest.mark.parametrize("layers", [1, 3])
def test_tables_and_masks_are_made_once(layers):
    harness = check_gradients(Model(by_turns, layers=layers), *inputs())
    assert len(rotations(harness)) == layers
    made = harness.parts[0]
    assert count(made, torch.ops.coda_inductor.keep.default) == 2
    assert count(made, torch.ops.aten.remainder.Scalar) == 1


def test_a_bias_and_a_deferred_norm_go_with_it():
    harness = check_gradients(Model(sliced, bias=True), *inputs())
    kinds = [sorted(o.kind for o in p.operands) for p in rotations(harness)]
    assert kinds[1] == ["col", "row", "row", "row", "table", "table"]


@pytest.mark.parametrize("spelling", ["sliced", "by turns"])
def test_dynamic_sizes(spelling):
    cut, keys = SPELLINGS[spelling]
    x, *tables = inputs()
    torch._dynamo.mark_dynamic(x, 0)
    assert len(rotations(check_gradients(Model(cut, keys), x, *tables))) == 2


def test_in_a_checkpoint():
    harness = check_gradients(Model(by_turns, checkpointed=True), *inputs())
    assert len(rotations(harness)) == 2


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_unfused_nothing_is_left_of_it(spelling):
    cut, keys = SPELLINGS[spelling]
    left, right = (
        check_gradients(Model(cut, keys, 1), *inputs(), disable=disabled).ops()
        for disabled in (("fuse",), ("fuse", "heads"))
    )
    moves = ("view", "permute", "alias", "slice", "split", "unbind", "getitem", "select", "squeeze")
    assert {k: n for k, n in left.items() if not any(m in k for m in moves)} == {
        k: n for k, n in right.items() if not any(m in k for m in moves)
    }


def test_infinities_beside_what_is_rotated():
    """Values are copied, not multiplied with 0."""

    def function(x, w, bias, cos, sin):
        q, k, v = sliced(x @ w + bias, B)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        return F.scaled_dot_product_attention(q, k, k), v.amax(-1), v.amin(-1)

    bias = randn(3 * H * D)
    bias[2 * H * D :: 4], bias[2 * H * D + 1 :: 4] = torch.inf, -torch.inf
    harness = check(function, randn(B, T, WIDTH), randn(WIDTH, 3 * H * D), bias, *inputs()[1:])
    assert len(rotations(harness)) == 1


def test_part_of_each_head():
    """DeepSeek's columns without positions, twice as many as those with: heads of a third each."""

    def function(x, w, cos, sin):
        q = (x @ w).view(B, T, H, 3 * D).transpose(1, 2)
        plain, turned = q.split([2 * D, D], -1)
        turned = rotary(turned, cos, sin)
        return F.scaled_dot_product_attention(turned, turned, plain[..., :D])

    harness = check_gradients(function, inputs()[0], randn(WIDTH, 3 * H * D), *inputs()[1:])
    assert len(rotations(harness)) == 1


def test_in_16_bits_other_columns_are_copied():
    model = Model(by_turns, layers=1).bfloat16()
    x, cos, sin = (t.detach().bfloat16() for t in inputs())
    (program,) = rotations(check(model, x, cos, sin))
    acc = torch.randn(B * T, 3 * H * D)
    names = [o.name for o in program.operands]
    tables = [torch.randn(B * T, D) for _ in range(2)]
    mask = (torch.arange(3 * H * D) // D % 3 < 2).float()
    given = dict(zip(sorted(names), [*tables, mask], strict=True))
    eye = torch.eye(3 * H * D)
    operands = [given[name] for name in names]
    (result,) = run_reference(program, [acc.bfloat16()], [eye.bfloat16()], operands)
    kept = mask == 0
    assert torch.equal(result[:, kept], acc.bfloat16()[:, kept])
    assert not torch.equal(result[:, ~kept], acc.bfloat16()[:, ~kept])


refused = functools.partial(passes.refused, rotate_rows)
X, W = (B * T, WIDTH), (WIDTH, 3 * H * D)


def turned(x, cos, sin, dtype=None):
    return rotate(x, cos, sin, D // 2, False, False, False, dtype or x.dtype)


def tables():
    return randn(T, D), randn(T, D)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(("b", "t"), [(1, T - 2), (1, 1), (2, T)])
def test_some_rows_only(b, t):
    """The first positions of one sequence, or the first of several."""

    def function(x, w, cos, sin):
        parts = [p.unflatten(-1, (-1, D)) for p in (x @ w).split(H * D, -1)]
        q, k, v = (p.transpose(1, 2)[:1, :, :t] for p in parts)
        return attend(rotary(q, cos[:, :t], sin[:, :t]), rotary(k, cos[:, :t], sin[:, :t]), v)

    _, cos, sin = inputs()
    x = randn(b, T, WIDTH).requires_grad_()
    assert not rotations(check_gradients(function, x, randn(*W), cos, sin))


def test_columns_that_are_read_as_other_numbers():
    """By strides of these, the second of two rows seems to be columns, and others than it reads."""

    def function(x, w, cos, sin):
        q, k, v = (p.view(1, 2, -1, D).transpose(1, 2) for p in (x @ w).split(H * D, -1))
        return attend(q, turned(k, cos, sin), v), k.view(torch.complex128).abs()

    given = randn(2, WIDTH), randn(*W), randn(2, D), randn(2, D)
    assert refused(function, *given) == {"heads-packed"}


def test_columns_that_something_else_reads():
    def function(x, w, cos, sin):
        q, k, v = sliced(x @ w, B)
        return attend(turned(q, cos, sin), q + k, v)

    assert refused(function, randn(*X), randn(*W), *tables()) == {"heads-packed"}


def test_rows_that_are_read_whole():
    def function(x, w, cos, sin):
        y = x @ w
        q, k, v = sliced(y, B)
        return attend(turned(q, cos, sin), k, v), y.sum()

    assert refused(function, randn(*X), randn(*W), *tables()) == {"heads-packed"}


def test_a_result_of_another_dtype():
    def function(x, w, cos, sin):
        q, k, v = sliced((x @ w).float(), B)
        return attend(turned(q, cos, sin, torch.float64), k.double(), v.double())

    args = (t.float() for t in (randn(*X), randn(*W), *tables()))
    assert refused(function, *args) == {"heads-packed"}


def test_other_tables_beside():
    """The first rotation is made with the rows, the second stays."""

    def function(x, w, cos, sin, c, s):
        q, k, v = sliced(x @ w, B)
        return attend(turned(q, cos, sin), turned(k, c, s), v)

    args = randn(*X), randn(*W), *tables(), *tables()
    graph = aten_graph(function, *args)
    record = run_pass(rotate_rows, graph)
    assert codes(record) == {"heads-packed"}
    assert count(graph, rotate_heads) == count(graph, rotate) == 1
    got = torch.fx.Interpreter(graph.owning_module).run(*args)
    torch.testing.assert_close(got, function(*args), rtol=0, atol=1e-10)


def test_heads_at_no_regular_places():
    def function(x, w, cos, sin):
        y = (x @ w).view(B, T, 3 * H, D).transpose(1, 2)
        q, k = y[:, :5:2], y[:, 5:]
        return attend(turned(q, cos, sin), k[:, :3], k[:, :3])

    assert refused(function, randn(*X), randn(*W), *tables()) == {"heads-packed"}


def test_a_layout_that_somebody_sees():
    def function(x, w, cos, sin):
        q, _, _ = sliced(x @ w, B)
        return turned(q, cos, sin)

    assert refused(function, randn(*X), randn(*W), *tables()) == {"heads-layout"}


@pytest.mark.parametrize("rows", [slice(0, T - 1), slice(1, T)], ids=["first", "last"])
def test_some_of_the_rows(rows):
    def function(x, w, cos, sin):
        q, k, v = sliced(x @ w, 1)
        q = turned(q[:, :, rows], cos[rows], sin[rows])
        return attend(q, k, v)

    assert refused(function, randn(T, WIDTH), randn(*W), *tables()) == {"heads-no-gemm"}


def test_what_no_gemm_makes():
    def function(y, cos, sin):
        q, k, v = sliced(y, B)
        return attend(turned(q, cos, sin), turned(k, cos, sin), v)

    assert refused(function, randn(B, T, 3 * H * D), *tables()) == {"heads-no-gemm"}


def test_a_second_run_does_nothing():
    def function(x, w, cos, sin):
        q, k, v = split((x @ w).view(B, T, -1), B)
        return attend(turned(q, cos, sin), turned(k, cos, sin), v)

    graph = aten_graph(function, randn(*X), randn(*W), *tables())
    run_pass(rotate_rows, graph)
    once = str(graph)
    assert count(graph, rotate_heads) == 1
    assert not run_pass(rotate_rows, graph).report.refusals
    assert str(graph) == once


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        ({0, 1, 2, 3}, (6, 0, 4)),
        ({0, 1, 3, 4}, (3, 0, 2)),
        ({1, 3, 5}, (2, 1, 2)),
        ({0, 1, 2, 3, 4, 5}, (1, 0, 1)),
        ({0, 2}, None),
        ({0, 1, 4, 5}, None),
    ],
)
def test_regular_places(heads, found):
    assert _regular(heads, 6) == found
