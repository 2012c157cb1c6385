# SPDX-License-Identifier: Apache-2.0
"""The op of heads' gradients: what autograd makes of norm and rotation, and what torch asks."""

from __future__ import annotations

import pytest
import torch
from head_cases import arguments, cases

from coda_inductor.runtime.head_gradients import HEAD_GRADIENT
from coda_inductor.semantic.norms import rms_norm_definition
from coda_inductor.semantic.rotary import rotate_definition


def test_it_is_the_gradient_of_norm_and_rotation():
    """Exactly, in float64; ``inverse`` of the forward pass is not that of its gradient."""
    for args in cases(torch.float64):
        dy, cos, sin, z, weight, scale, eps, distance, paired, inverse, _ = args
        x = (torch.randn_like(dy) if z is None else z).detach().requires_grad_()
        gamma = None if weight is None else weight.detach().requires_grad_()
        y = x if z is None else rms_norm_definition(x, gamma, eps, x.dtype)[0]
        y = rotate_definition(y, cos, sin, distance, paired, not inverse, False, x.dtype)
        inputs = [t for t in (x, gamma) if t is not None]
        want, *more = torch.autograd.grad(y, inputs, dy)
        rows, scaled, dweight = HEAD_GRADIENT(*args)
        want = want.transpose(1, 2).flatten(2)
        torch.testing.assert_close(rows, want)
        if scale is not None:
            torch.testing.assert_close(scaled, want * scale.double().view(*want.shape[:2], 1))
        if more:
            torch.testing.assert_close(dweight, more[0])


@pytest.mark.parametrize("how", [(0, 0, 0), (1, 1, 1)])
def test_op_obeys_torchs_rules(how):
    args = arguments((2, 3, 5, 8), torch.bfloat16, how=how)
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    torch.library.opcheck(HEAD_GRADIENT, args, test_utils=checks)


def test_no_tokens():
    args = arguments((0, 3, 5, 8), torch.bfloat16)
    rows, scaled, dweight = HEAD_GRADIENT(*args)
    assert rows.shape == scaled.shape == (0, 5, 24)
    assert not dweight.any()
