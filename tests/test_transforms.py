# SPDX-License-Identifier: Apache-2.0
"""Forward-mode differentiation and torch.func's transforms inside the compiled function: equal to
eager. Semantic ops go backward only, so none is made where something goes forward."""

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.nn.functional as F
from checking import assert_same, randn, reasons
from harness import Harness
from torch.utils.checkpoint import checkpoint

D = 8
X, W = randn(4, D), randn(D, D)
GAMMA, DX = randn(D), randn(4, D)


def net(x):
    h = F.rms_norm(x, (D,), GAMMA, 1e-5) @ W
    return F.silu(h @ W) * (h @ W.t())


#: What is made of a function inside of the compiled one, and the function.
TRANSFORMS = {
    "jvp_of_the_loss": (
        lambda f: lambda x: torch.func.jvp(f, (x,), (DX,)),
        lambda x: F.cross_entropy(x @ W, torch.arange(4)),
    ),
    "jacfwd": (torch.func.jacfwd, net),
    "vmap": (torch.func.vmap, net),
    "grad": (torch.func.grad, lambda x: net(x).sum()),
    "vmap_of_jvp": (
        lambda f: lambda x: torch.func.vmap(f)(x, DX),
        lambda x, dx: torch.func.jvp(net, (x,), (dx,)),
    ),
}


@pytest.mark.parametrize(("transform", "of"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform, of):
    def function(x):
        return transform(of)(x)

    assert_same(Harness().run(function, X), function(X))


@pytest.mark.parametrize("region", [False, True])
def test_tangents(region):
    def function(x):
        with fw.dual_level():
            x = fw.make_dual(x, DX)
            y = checkpoint(net, x, use_reentrant=False) if region else net(x)
            return tuple(fw.unpack_dual(y))

    x, harness = X.clone().requires_grad_(), Harness()
    assert_same(harness.train(function, x), function(x))
    assert "forward-mode differentiation" in reasons(harness)


def test_levels_beside_a_module_cost_it_nothing():
    """Another graph of the same process is raised as ever."""
    with fw.dual_level():
        fw.make_dual(X, DX)
        harness = Harness()
        harness.run(net, X)
    assert harness.counts["swiglu"]
