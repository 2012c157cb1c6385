# SPDX-License-Identifier: Apache-2.0
"""One token without a dimension of tokens: norms, gates and residuals of vectors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

NORMS = {
    "rms": lambda x, w: F.rms_norm(x, x.shape, w, 1e-6),
    "rms by hand": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "layer": lambda x, w: F.layer_norm(x, x.shape, w, w),
}
BETWEEN = {
    "nothing": lambda h, other: h,
    "gate": lambda h, other: F.silu(h) * other,
    "residual": lambda h, other: other + F.gelu(h),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("norm", NORMS)
def test_of_vectors(norm, between):
    shapes = (8,), (8,), (8, 2), (8, 2), (2,), (2, 4)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def chain(x, first, gate, up, second, down):
        normed = NORMS[norm](x, first)
        return NORMS[norm](BETWEEN[between](normed @ gate, normed @ up), second) @ down

    want, got = (f(*inputs) for f in (chain, torch.compile(chain, backend="coda")))
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(out.sum(), inputs, allow_unused=True) for out in (got, want)]
    torch.testing.assert_close(*gradients)
