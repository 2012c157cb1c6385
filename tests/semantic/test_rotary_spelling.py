# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as people's models spell them become one op: by tables of all columns of a head
or one angle a pair, of halves, of pairs, by complex numbers. What only looks like one stays, with a
reason. Their gradients, and what Inductor makes of those that no pass takes."""

import pytest
import torch
from checking import check_gradients, raised, randn, reasons
from passes import codes
from torch._inductor.utils import run_and_get_code
from zoo.idioms import rotate_every_two, rotate_half

from coda_inductor.semantic.rotary import rotate, rotate_pairs

B, T, H, D = 2, 5, 3, 8
HEADS = (B, T, H, D)


def llama(x, cos, sin):
    x = x.transpose(1, 2)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def part(turn):
    def function(x, cos, sin):
        x, width = x.transpose(1, 2), cos.shape[-1]
        part, rest = x[..., :width], x[..., width:]
        turned = part * cos.unsqueeze(1) + turn(part) * sin.unsqueeze(1)
        return torch.cat([turned, rest], dim=-1)

    return function


def plain(a, b, c, s):
    return a * c - b * s, b * c + a * s


def vllm(x, cos, sin):
    turned = plain(x[..., ::2], x[..., 1::2], cos[:, None], sin[:, None])
    return torch.stack(turned, -1).flatten(-2)


def stacked_halves(x, cos, sin):
    turned = plain(*x.unflatten(-1, (2, -1)).unbind(-2), cos[:, None], sin[:, None])
    return torch.stack(turned, -2).flatten(-2)


def torchtune(x, cos, sin):
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(*x.shape[:-1], -1, 2)
    table = torch.stack([cos, sin], -1).view(1, T, 1, D // 2, 2)
    turned = plain(pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1])
    return torch.stack(turned, -1).flatten(3).type_as(x)


def gpt_oss(x, cos, sin):
    first, second = torch.chunk(x.transpose(1, 2), 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def lucidrains(x, cos, sin):
    first, second = x.reshape(B, T, H, D // 2, 2).unbind(dim=-1)
    turned = torch.stack((-second, first), dim=-1).reshape(x.shape)
    cos, sin = (t.unsqueeze(-2).repeat_interleave(2, -1) for t in (cos, sin))
    return x * cos + turned * sin


def torchtitan(x, cos, sin):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    z = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
    turns = torch.complex(cos, sin).to(z.dtype).view(1, T, 1, D // 2)
    return torch.view_as_real(z * turns).flatten(3).type_as(x)


def turned_back(x, cos, sin):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None].conj()
    return torch.view_as_real(z).reshape(x.shape)


ONE, SMALL = (1, T, H, D), (T, D // 2)
#: (function, op, shape of tables, dtype). Tables have all of a head's columns, or one angle a pair.
CASES = [
    (llama, rotate, (B, T, D), torch.float64),
    (part(rotate_half), rotate, (1, T, D // 2), torch.float64),  # GPT-NeoX
    (part(rotate_half), rotate, (1, T, D), torch.float64),  # no column is left
    (part(rotate_every_two), rotate, (B, T, D // 2), torch.float64),  # GLM
    *((f, rotate, SMALL, torch.float64) for f in (torchtune, gpt_oss, lucidrains, vllm)),
    (stacked_halves, rotate, SMALL, torch.float64),
    *((f, rotate_pairs, SMALL, torch.float64) for f in (torchtitan, turned_back)),
    *((f, rotate, SMALL, torch.bfloat16) for f in (torchtune, lucidrains)),
]


def tables(*shape, dtype=torch.float64):
    """No rotations: what holds is to hold whatever they are."""
    return randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)


def inputs(shape, of_tables, dtype=torch.float64):
    return randn(*shape, dtype=dtype).requires_grad_(), *tables(*of_tables, dtype=dtype)


def check_all(functions, how):
    """All in one graph, each of tensors of its own."""

    def function(*given):
        return [f(*given[3 * i : 3 * i + 3]) for i, f in enumerate(functions)]

    return check_gradients(function, *(t for each in how for t in inputs(*each)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_fires_and_agrees(dtype):
    cases = [case for case in CASES if case[-1] == dtype]
    harness = check_all([f for f, *_ in cases], [(HEADS, *how) for _, _, *how in cases])
    made = [n.target for n in harness.raised.nodes if n.target in (rotate, rotate_pairs)]
    assert made == [op for _, op, *_ in cases]
    left = {getattr(n.target, "__name__", n.target) for n in harness.raised.nodes}
    assert not {"sub", "neg", "chunk", "unbind", "view_as_complex"} & left


def both(x, cos, sin):
    turned = rotate_half(x)
    return x * cos + turned * sin, turned


def view_without_gradient(x, cos, sin):
    """The rotation would have that one's gradient, for both."""
    with torch.no_grad():
        without = x.view(x.shape)
    x, c, s = x.view(x.shape), cos[:, None], sin[:, None]
    y1 = without[..., : D // 2] * c - without[..., D // 2 :] * s
    return torch.cat((y1, x[..., D // 2 :] * c + x[..., : D // 2] * s), -1)


def laid_out_anew(x, cos, sin):
    table = cos.clone()
    before = table[:, None]
    table.t_()
    (first, second), c, s = x.chunk(2, -1), table[:, None], sin[:, None]
    return torch.cat((first * before - second * s, second * c + first * s), -1)


def own_turns(x, cos, sin):
    """A batch of one, turned in two ways."""
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * torch.complex(cos, sin)[:, :, None]).flatten(3)


def scaled(x, cos, _sin):
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * cos[:, None]).flatten(3)


def both_minus(x, cos, sin):
    (a, b), c, s = x.chunk(2, -1), cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c - a * s), -1)


def pairs_of_halves(x, cos, sin):
    return torch.stack(plain(*x.chunk(2, -1), cos[:, None], sin[:, None]), -1).flatten(-2)


#: Name -> function, shapes of x and of tables, the code of a refusal or "".
OTHERS = {
    "both minus": (both_minus, HEADS, SMALL, ""),
    "pairs of halves": (pairs_of_halves, HEADS, SMALL, ""),
    "laid out anew": (laid_out_anew, (B, 4, H, D), (4, 4), ""),
    "view without gradient": (view_without_gradient, HEADS, SMALL, ""),
    "read elsewhere": (both, HEADS, (T, 1, D), "intermediate-used"),
    "unequal parts": (
        lambda x, cos, sin: x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin,
        HEADS, (T, 1, D), "idiom-form",
    ),
    "narrow tables": (llama, HEADS, (1, T, 1), "idiom-form"),
    "another shape": (llama, ONE, (B, T, D), "idiom-form"),
    "complex, another shape": (own_turns, ONE, (B, T, D // 2), "idiom-form"),
    "complex, but scaled": (scaled, HEADS, SMALL, "idiom-form"),
}  # fmt: skip


def found(harness):
    return sum(raised(harness, each) for each in (rotate, rotate_pairs))


def test_what_only_looks_like_one_stays():
    others = OTHERS.values()
    harness = check_all([f for f, *_ in others], [shapes for _, *shapes, _ in others])
    assert not found(harness)
    assert {code for *_, code in OTHERS.values()} - {""} <= codes(harness)
    assert "it multiplies torch.float64 and torch.float64" in reasons(harness)
    assert "tables of 1 and 1 columns for 8 rotated ones" in reasons(harness)


LEARNED = {"llama": (llama, HEADS, (1, T, D)), "complex": (torchtitan, HEADS, SMALL)}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_tables_are_left_alone(name):
    function, *shapes = LEARNED[name]
    x, cos, sin = inputs(*shapes)
    harness = check_gradients(function, x, cos.requires_grad_(), sin)
    assert not found(harness)
    assert "need a gradient" in reasons(harness)


@pytest.mark.parametrize(("width", "distance", "joined", "paired", "inverse"), [
    (8, 4, False, False, True), (8, 4, False, True, False), (8, 1, False, True, True),
    (8, 2, False, False, False), (4, 2, True, False, True), (4, 1, True, True, False),
])  # fmt: skip
def test_gradient_is_the_transposed_map(width, distance, joined, paired, inverse):
    width = width // 2 if paired else width
    x, (cos, sin) = randn(T, H, D).requires_grad_(), tables(T, 1, width)
    run = lambda x: rotate(x, cos, sin, distance, paired, inverse, joined, x.dtype)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x,))
    dy = randn(T, H, D)
    back = rotate(dy, cos, sin, distance, paired, not inverse, joined, x.dtype)
    torch.testing.assert_close((back * x).sum(-1), (dy * run(x)).sum(-1))


def test_gradient_of_complex_turns_is_the_rotation_back():
    angles = randn(T, 1, D // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    x = randn(T, H, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate_pairs(x, turns, x.dtype), (x,))
    back = rotate_pairs(rotate_pairs(x, turns, x.dtype), turns.conj(), x.dtype)
    torch.testing.assert_close(back, x)


def test_complex_numbers_through_inductor():
    given = [t.float() for t in (randn(*HEADS), *tables(T, D // 2))]
    ours, (code,) = run_and_get_code(torch.compile(torchtitan, backend="coda"), *given)
    torch.testing.assert_close(ours, torchtitan(*given))
    assert "view_as_complex" not in code
    assert "aten.mul" not in code
