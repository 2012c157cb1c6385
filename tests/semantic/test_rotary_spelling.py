# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as other people's models spell them: by products of halves or of pairs with one
angle each, forward and back, from columns that are taken out in every way."""

from __future__ import annotations

import pytest
import torch
from checking import check, check_gradients, raised, randn

from coda_inductor.semantic.rotary import rotate, rotate_pairs

B, T, H, D = 2, 5, 3, 8


def under_heads(table):
    return table[:, None, :]


def nanochat(x, cos, sin):
    first, second = x[..., : D // 2], x[..., D // 2 :]
    y1 = first * under_heads(cos) + second * under_heads(sin)
    y2 = first * (-under_heads(sin)) + second * under_heads(cos)
    return torch.cat([y1, y2], 3)


def modded(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = under_heads(cos), under_heads(sin)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), 3).type_as(x)


def gpt_oss(x, cos, sin):
    first, second = torch.chunk(x.transpose(1, 2), 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def vllm_pairs(x, cos, sin):
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def torchtune(x, cos, sin):
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(*x.shape[:-1], -1, 2)
    table = torch.stack([cos, sin], -1).view(1, T, 1, D // 2, 2)
    turned = torch.stack(
        [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
        ],
        -1,
    )
    return turned.flatten(3).type_as(x)


def unbound(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = under_heads(cos), under_heads(sin)
    return torch.stack((first * cos + second * sin, second * cos - first * sin), -1).reshape(
        x.shape
    )


def negated_pairs(x, cos, sin):
    first, second = x.view(B, T, H, -1, 2).select(-1, 0), x.view(B, T, H, -1, 2).select(-1, 1)
    cos, sin = under_heads(cos), under_heads(sin)
    return torch.stack((first * cos + second * sin, second * cos + first * -sin), -1).view(x.shape)


def stacked_halves(x, cos, sin):
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    cos, sin = under_heads(cos), under_heads(sin)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -2).flatten(-2)


def partial(x, cos, sin):
    (first, second), rest = x[..., : D // 2].chunk(2, -1), x[..., D // 2 :]
    cos, sin = under_heads(cos[:, : D // 4]), under_heads(sin[:, : D // 4])
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned, rest), -1)


def partial_beside(x, cos, sin):
    part, rest = x.split(D // 2, -1)
    first, second = part.narrow(-1, 0, D // 4), part[..., -D // 4 :]
    cos, sin = under_heads(cos[:, : D // 4]), under_heads(sin[:, : D // 4])
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def partial_pairs(x, cos, sin):
    part, rest = x.split([D // 2, D // 2], -1)
    first, second = part[..., ::2], part[..., 1::2]
    cos, sin = under_heads(cos[:, : D // 4]), under_heads(sin[:, : D // 4])
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned.flatten(-2), rest), -1)


def lucidrains(x, cos, sin):
    first, second = x.reshape(B, T, H, D // 2, 2).unbind(dim=-1)
    turned = torch.stack((-second, first), dim=-1).reshape(x.shape)
    cos, sin = (under_heads(t).repeat_interleave(2, -1) for t in (cos, sin))
    return x * cos + turned * sin


def esm(x, cos, sin):
    first, second = x.split(D // 2, -1)
    cos, sin = (under_heads(torch.cat((t, t), -1)) for t in (cos, sin))
    return x * cos + torch.cat((-second, first), -1) * sin


def einops(x, cos, sin):
    halves = x.reshape(B, T, H, 2, D // 2)
    first, second = halves[..., 0, :], halves[:, :, :, 1]
    cos, sin = (under_heads(torch.cat((t, t), -1)) for t in (cos, sin))
    return x * cos + torch.cat((-second, first), -1) * sin


SPELLINGS = (
    nanochat, modded, gpt_oss, vllm_pairs, torchtune, unbound, negated_pairs, stacked_halves,
    partial, partial_beside, partial_pairs, lucidrains, esm, einops,
)  # fmt: skip


def inputs(dtype=torch.float64):
    """Tables that are no rotations: what holds is to hold whatever they are."""
    tables = (randn(T, D // 2, dtype=dtype) for _ in range(2))
    return randn(B, T, H, D, dtype=dtype).requires_grad_(), *tables


IN_16_BITS = (modded, vllm_pairs, torchtune, lucidrains)


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [*((s, torch.float64) for s in SPELLINGS), *((s, torch.bfloat16) for s in IN_16_BITS)],
)
def test_fires_and_agrees(spelling, dtype):
    harness = check_gradients(spelling, *inputs(dtype))
    assert raised(harness, rotate) == 1
    left = {getattr(n.target, "__name__", n.target) for n in harness.raised.nodes}
    assert not {"sub", "neg", "chunk", "unbind"} & left


def complex_numbers(take, put):
    def function(x, cos, sin):
        z = torch.view_as_complex(take(x)) * torch.complex(cos, sin)[:, None]
        return put(torch.view_as_real(z), x)

    return function


@pytest.mark.parametrize("put", [lambda y, x: y.reshape(x.shape), lambda y, x: y.flatten(-2)])
@pytest.mark.parametrize(
    "take", [lambda x: x.unflatten(-1, (-1, 2)), lambda x: x.view(B, T, H, D // 2, 2)]
)
def test_complex_numbers(take, put):
    harness = check_gradients(complex_numbers(take, put), *inputs())
    assert raised(harness, rotate_pairs) == 1


def sums(one, other):
    """What is no rotation, or none of these columns."""

    def function(x, cos, sin):
        first, second = x.chunk(2, -1)
        c, s = under_heads(cos), under_heads(sin)
        return torch.cat((one(first, second, c, s), other(first, second, c, s)), -1)

    return function


@pytest.mark.parametrize(
    "function",
    [
        sums(lambda a, b, c, s: a * c - b * s, lambda a, b, c, s: b * c - a * s),  # both minus
        sums(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: b * c + a * s),  # both plus
        sums(lambda a, b, c, s: a * c - b * s, lambda a, b, c, s: a * c + b * s),  # a again
        sums(lambda a, b, c, s: b * c - a * s, lambda a, b, c, s: a * c + b * s),  # exchanged
        sums(lambda a, b, c, s: a * c - b * s, lambda a, b, c, s: b * s + a * c),  # tables too
        lambda x, c, s: x[..., ::2] * c[:, None] - x[..., 1::2] * s[:, None],  # half of it
        lambda x, c, s: torch.stack(  # pairs from halves
            (
                x.chunk(2, -1)[0] * c[:, None] - x.chunk(2, -1)[1] * s[:, None],
                x.chunk(2, -1)[1] * c[:, None] + x.chunk(2, -1)[0] * s[:, None],
            ),
            -1,
        ).flatten(-2),
        lambda x, c, s: torch.stack(  # laid out otherwise
            (
                x[..., ::2] * c[:, None] - x[..., 1::2] * s[:, None],
                x[..., 1::2] * c[:, None] + x[..., ::2] * s[:, None],
            ),
            2,
        ).flatten(-2),
    ],
)
def test_other_sums_are_other_ops(function):
    harness = check_gradients(function, *inputs())
    assert raised(harness, rotate) == 0


def test_tables_that_are_two_copies_of_what_changes_between_them():
    """Views of one tensor are one table; copies are not."""

    def function(x, cos, sin):
        first, second = x.chunk(2, -1)
        table = cos.clone()
        before = table.repeat(1, 1)
        y1 = first * under_heads(before) - second * under_heads(sin)
        table.mul_(2)
        y2 = second * under_heads(table.repeat(1, 1)) + first * under_heads(sin)
        return torch.cat((y1, y2), -1)

    assert raised(check(function, *inputs()), rotate) == 0


def test_views_of_which_one_has_no_gradient():
    """The rotation would have that one's gradient, for both."""

    def of_x(x, cos, sin):
        with torch.no_grad():
            without = x.view(B, T, H, D)
        x, c, s = x.view(B, T, H, D), under_heads(cos), under_heads(sin)
        y1 = without[..., : D // 2] * c - without[..., D // 2 :] * s
        return torch.cat((y1, x[..., D // 2 :] * c + x[..., : D // 2] * s), -1)

    def of_a_table(x, cos, sin):
        with torch.no_grad():
            without = cos.unsqueeze(1)
        (first, second), c, s = x.chunk(2, -1), cos.unsqueeze(1), under_heads(sin)
        return torch.cat((first * without - second * s, second * c + first * s), -1)

    x, cos, sin = inputs()
    flat = x.detach().flatten(2).requires_grad_()
    assert raised(check_gradients(of_x, flat, cos, sin), rotate) == 0
    assert raised(check_gradients(of_a_table, x, cos.requires_grad_(), sin), rotate) == 0


def test_views_of_what_is_laid_out_anew_between_them():
    def function(x, cos, sin):
        table = cos.clone()
        before = table[:, None]
        table.t_()
        (first, second), c, s = x.chunk(2, -1), table[:, None], sin[:, None]
        return torch.cat((first * before - second * s, second * c + first * s), -1)

    harness = check(function, randn(B, 4, H, D), randn(4, 4), randn(4, 4))
    assert raised(harness, rotate) == 0


@pytest.mark.parametrize("index", [(), True, (True, Ellipsis), (None, Ellipsis), (0, Ellipsis)])
def test_indices_that_take_no_columns(index):
    def function(x, scale):
        scale = scale if index == (0, Ellipsis) else scale.sum()
        return torch.cat((x * scale[index], x), -1).sum()[()]

    assert not check(function, randn(2, 3), randn(1, 3)).report.near_misses


def test_thirds_are_left_alone():
    def thirds(x, cos, sin):
        x = x[..., :6]
        first, second, _ = x.chunk(3, -1)
        c, s = under_heads(cos[:, :2]), under_heads(sin[:, :2])
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    assert raised(check(thirds, *inputs()), rotate) == 0
