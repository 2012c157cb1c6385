# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings written with complex numbers become real elementwise work."""

from __future__ import annotations

import pytest
import torch
from checking import check, check_gradients, raised, randn, reasons
from torch._inductor.utils import run_and_get_code

from coda_inductor.semantic.rotary import rotate_pairs

B, T, H, D = 2, 5, 3, 8


def turns(dtype=torch.float64):
    angles = torch.outer(torch.arange(T, dtype=dtype), 0.3 ** torch.arange(D // 2, dtype=dtype))
    return torch.polar(torch.ones_like(angles), angles)


def torchtitan(q, k, freqs):
    """``apply_rotary_emb``; the casts are to the inputs' own width here, so that float64 stays."""

    def wide(x):
        return x.to(torch.promote_types(x.dtype, torch.float32))

    q_ = torch.view_as_complex(wide(q).reshape(*q.shape[:-1], -1, 2))
    k_ = torch.view_as_complex(wide(k).reshape(*k.shape[:-1], -1, 2))
    freqs = freqs.view(1, T, 1, D // 2)
    q_out = torch.view_as_real(q_ * freqs).flatten(3)
    k_out = torch.view_as_real(k_ * freqs).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def heads(n, dtype=torch.float64):
    return randn(B, T, n, D, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_fires_and_agrees(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    harness = check_gradients(torchtitan, heads(H, dtype), heads(1, dtype), turns(wide))
    assert raised(harness, rotate_pairs) == 2
    complex_ops = [n for n in harness.graph.nodes if "view_as_complex" in str(n.target)]
    assert not complex_ops


def test_three_dimensions_and_inference():
    def rotate(x, freqs):
        z = torch.view_as_complex(x.reshape(T, H, -1, 2))
        return torch.view_as_real(z * freqs[:, None]).flatten(2)

    assert raised(check(rotate, randn(T, H, D), turns()), rotate_pairs) == 1


def test_halves_that_are_paired_are_left_alone():
    def rotate(x, freqs):
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
        z = z * freqs[:, None]
        return torch.cat([z.real, z.imag], -1)

    assert raised(check(rotate, randn(B, T, H, D), turns()), rotate_pairs) == 0


def test_learned_turns_are_left_alone():
    def rotate(x, angles):
        freqs = torch.polar(torch.ones_like(angles), angles)
        z = torch.view_as_complex(x.reshape(B, T, H, -1, 2))
        return torch.view_as_real(z * freqs[:, None]).flatten(3)

    harness = check_gradients(rotate, heads(H), randn(T, D // 2).requires_grad_())
    assert raised(harness, rotate_pairs) == 0
    assert "a gradient of the turns is wanted" in reasons(harness)


def test_other_results_are_left_alone():
    def rotate(x, freqs, first):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * freqs).flatten(first)

    x, own = randn(1, T, H, D), torch.stack([turns(), turns()])[:, :, None]
    harness = check(lambda x, own: rotate(x, own, 3), x, own)  # a batch of one, turned in two ways
    assert raised(harness, rotate_pairs) == 0
    assert "is not shaped like the input" in reasons(harness)
    harness = check(lambda x, own: rotate(x, own, 2), x.expand(B, T, H, D), own)
    assert raised(harness, rotate_pairs) == 0


@pytest.mark.parametrize("inverse", [False, True])
def test_gradient_is_the_rotation_back(inverse):
    freqs = turns()[:, None]
    x = randn(T, H, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate_pairs(x, freqs, inverse, x.dtype), (x,))
    back = rotate_pairs(rotate_pairs(x, freqs, inverse, x.dtype), freqs, not inverse, x.dtype)
    torch.testing.assert_close(back, x)


def test_a_compiled_model_agrees():
    """Through Inductor itself, which has no code for complex numbers."""
    q, k, freqs = heads(H).detach().float(), heads(1).detach().float(), turns(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(torchtitan, backend="coda")
    ours, (code,) = run_and_get_code(compiled, q, k, freqs)
    for have, want in zip(ours, torchtitan(q, k, freqs), strict=True):
        torch.testing.assert_close(have, want)
    assert "view_as_complex" not in code
    assert "aten.mul" not in code
