# SPDX-License-Identifier: Apache-2.0
"""``numerics="eager"`` with kernels. Where accumulators are exact, the bits are eager's. Elsewhere
cuBLAS and our main loops sum in different orders, and the test logs how many results differ
(``-rP`` shows it)."""

import logging

import pytest
import torch
from layers import compiled, make
from test_eager import EXACT, small_integers

import coda_inductor

LOG = logging.getLogger(__name__)
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("fresh")]


@EXACT
def test_bits_are_eagers_where_accumulators_are_exact(function):
    arguments = small_integers("cuda")
    with torch.no_grad():
        want = function(*arguments)
        have = compiled(function, numerics="eager")(*arguments)
        assert "kernel" in {site.how for site in coda_inductor.reports()[-1].sites}
        torch._dynamo.reset()
        other = compiled(function)(*arguments)
    assert torch.equal(have, want)
    assert not torch.equal(other, want)


def test_fewer_bits_differ_in_a_layer():
    model, differing = make(), {}
    torch.manual_seed(1)
    xs = [torch.randn(1, 264, 256, device="cuda").bfloat16() for _ in range(2)]
    with torch.no_grad():
        want = model(*xs)
        for numerics in ("eager", "fused"):
            torch._dynamo.reset()
            have = compiled(model, numerics=numerics)(*xs)
            parts = [(a != b).float().mean().item() for a, b in zip(have, want, strict=True)]
            differing[numerics] = parts
    LOG.warning("part of the results with other bits than eager's: %s", differing)
    assert max(differing["eager"]) < min(differing["fused"])
