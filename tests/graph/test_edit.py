# SPDX-License-Identifier: Apache-2.0
"""What is inserted into graphs."""

import torch
from harness import Harness


def test_a_result_that_is_returned_again_keeps_its_gradient():
    """A pass drops the detach, which only renames, so that the graph returns y twice."""

    def function(x, w):
        y = x @ w
        return y.detach(), y.mT

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    _, ours = Harness().train(function, x, w)
    have, want = (torch.autograd.grad(y.sin().sum(), (x, w)) for y in (ours, function(x, w)[1]))
    torch.testing.assert_close(have, want)
