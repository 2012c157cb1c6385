# SPDX-License-Identifier: Apache-2.0
"""Steps that round do so where Inductor compiles them, too: it drops a cast down and up."""

import pytest
import torch

from coda_inductor.program import OPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_inductor_keeps_a_rounding_step(dtype):
    x = torch.randn(64, 33) * torch.logspace(-9, 6, 33)
    x[1, :4] = torch.tensor([65519.0, 65520.0, 1 + 2**-11, 1 + 2**-8])  # ties, and the largest
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    step = OPS[f"round_{str(dtype).removeprefix('torch.')}"].torch
    expected = x.clamp(-448, 448).to(dtype).float() if dtype.itemsize == 1 else x.to(dtype).float()

    for function in (step, torch.compile(lambda x: step(x * 1.0), backend="inductor")):
        torch.testing.assert_close(function(x), expected, rtol=0, atol=0, equal_nan=True)
