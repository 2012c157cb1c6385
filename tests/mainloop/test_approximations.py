# SPDX-License-Identifier: Apache-2.0
"""The functions that epilogues compute without a branch, in float32 against torch's in float64."""

import types

import pytest
import torch

from coda_inductor.mainloop import approximations

#: The primitives, as exact as float32 is; the hardware's are off by about one unit more.
TORCH = types.SimpleNamespace(
    exp2=torch.exp2,
    log2=torch.log2,
    reciprocal_of_normal=torch.reciprocal,
    absolute=torch.abs,
    where=lambda c, x, y: torch.where(c, torch.as_tensor(x), torch.as_tensor(y)),
    lt=lambda x, y: torch.as_tensor(x) < y,
)
#: Interval, and whether the error is relative to the value (else to 1).
RANGES = {
    "erf": (-6, 6, True),
    "log1p": (-0.999, 50, True),
    "expm1": (-20, 4, True),
    "tanh": (-20, 20, False),
}


@pytest.mark.parametrize("name", RANGES)
def test_error_is_that_of_float32(name):
    low, high, relative = RANGES[name]
    spread = torch.linspace(low, high, 400_001)
    small = torch.logspace(-12, 0, 20_001)
    x = torch.cat([spread, small, -small * 0.999]).float()
    have = getattr(approximations, name)(x, TORCH)
    want = getattr(torch, name)(x.double())
    error = (have.double() - want).abs()
    assert have.dtype == torch.float32
    assert (error / want.abs().clamp_min(1e-30) if relative else error).max() < 5e-7
    ends = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 88.0, -88.0])
    have, want = getattr(approximations, name)(ends, TORCH), getattr(torch, name)(ends)
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6, equal_nan=True)
