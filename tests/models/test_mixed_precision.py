# SPDX-License-Identifier: Apache-2.0
"""float32 weights under bfloat16 autocast: what fuses there, and what it does to the gradients."""

import pytest
import torch
import torch.nn.functional as F
from harness import Harness
from torch import nn
from zoo.layers import Decoder

from coda_inductor.explanation.capture import capture
from coda_inductor.mainloop import availability
from coda_inductor.options import parse


def sites(function, *args):
    """Those of a training step on an H100 that fuses whatever is legal."""
    settings = parse(None, {"gate": "always"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(availability, "kernel_stack", lambda *_: None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ((found,), _) = capture(function, args, {}, settings, device=torch.device("cuda", 0))
    return found.report.sites


def test_all_weight_gradients_of_a_decoder_leave_in_float32():
    """The rest fuses as with bfloat16 weights."""
    ids = torch.zeros(2, 32, dtype=torch.long)
    fused = [site for site in sites(Decoder(1, width=64), ids) if site.how == "kernel"]
    weights = [site for site in fused if site.role == "weight gradient"]
    assert len(weights) == 7 + 1
    for site in weights:
        assert [(s.value, s.dtype) for s in site.program.stores] == [("acc", "float32")]
    assert sum(site.role == "forward" for site in fused) == 4  # q, k and v are behind no GEMM
    assert sum(site.role == "input gradient" for site in fused) == 4


def test_a_weight_gradient_leaves_unrounded():
    """With the kernels' numerics: eager rounds it to bfloat16 and widens that."""
    linear, x = nn.Linear(16, 24, bias=False), torch.randn(40, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = Harness(reference=True).train(lambda x: F.linear(x, linear.weight).float(), x)
        result.square().sum().backward()
    dz, half = 2 * result.detach(), x.bfloat16().double()
    exact = dz.bfloat16().double().t() @ half
    error = (linear.weight.grad - exact).norm() / exact.norm()
    assert error < 1e-6
    assert (exact.bfloat16() - exact).norm() / exact.norm() > 1e-3
