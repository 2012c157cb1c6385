# SPDX-License-Identifier: Apache-2.0
"""Gradients of heads on a GPU: the kernel against float32, and in models."""

from __future__ import annotations

import pytest
import torch
from head_cases import NAMES, arguments, cases, error, in_float32

from coda_inductor.runtime.head_gradients import HEAD_GRADIENT, _launched, head_gradient

pytestmark = pytest.mark.gpu

#: (B, H, T, D) of models, ragged; the second has more rows than fit a 32-bit offset in elements.
SHAPES = ((2, 32, 333, 64), (1, 6, 3000, 128), (1, 4, 517, 256), (3, 5, 77, 80), (1, 1, 1, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_plain_ops(dtype):
    for args in cases(dtype, SHAPES, "cuda"):
        *given, eps, distance, paired, inverse, dweight = args
        have = _launched(*given, eps, distance == 1, paired, inverse, dweight)
        plain, exact = head_gradient(*args), head_gradient(*in_float32(args))
        for name, mine, theirs, want in zip(NAMES, have, plain, exact, strict=True):
            assert (mine.shape, mine.dtype) == (want.shape, theirs.dtype), name
            assert error(mine, want) <= 2 * error(theirs, want) + 1e-6, (name, args[0].shape)
        again = _launched(*given, eps, distance == 1, paired, inverse, dweight)
        assert all(map(torch.equal, again, have))  # the launch that is known


def test_a_launch_that_is_known_has_other_tensors():
    torch.cuda.synchronize()
    for how in ((0, 0, 1), (1, 1, 1)):
        for _ in range(3):
            args = arguments((1, 4, 65, 64), torch.bfloat16, how=how, device="cuda")
            have = HEAD_GRADIENT.direct(*args)
            for mine, want in zip(have, head_gradient(*in_float32(args)), strict=True):
                assert error(mine, want) < 5e-3


def test_many_elements():
    """Offsets of more than 2^31 elements."""
    args = arguments((1, 33, 2**19, 128), torch.bfloat16, how=(0, 0, 0), device="cuda")
    have = HEAD_GRADIENT(*args)[0]
    last = tuple(a[:, :, -8:] if isinstance(a, torch.Tensor) else a for a in args)
    assert error(have[:, -8:], head_gradient(*in_float32(last))[0]) < 5e-3


def test_a_kernel_that_fails_costs_a_warning(monkeypatch, caplog):
    from coda_inductor.mainloop import head_gradients

    def fail(*_args, **_kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(head_gradients, "head_gradient", fail)
    args = arguments((1, 4, 65, 64), torch.bfloat16, device="cuda")
    have = HEAD_GRADIENT(*args)
    assert "no such instruction" in caplog.text
    for mine, want in zip(have, head_gradient(*args), strict=True):
        assert torch.equal(mine, want)
