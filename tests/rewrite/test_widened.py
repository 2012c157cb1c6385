# SPDX-License-Identifier: Apache-2.0
"""A widened product is computed by each of its readers, and no epilogue stores it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import randn
from harness import Harness
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.rewrite.widened import compute_for_each

D, HIDDEN = 16, 24
MUL = torch.ops.aten.mul.Tensor


def row_sums(dy, gamma, n):
    product = dy.float() * gamma
    return product - n * (product * n).mean(-1, keepdim=True)


def half(*shape, dtype=torch.bfloat16):
    return randn(*shape).to(dtype)


def rewritten(function, *args):
    """(results before, results after, how many products more there are)."""
    module = make_fx(function, tracing_mode="fake")(*args)
    before, count = module(*args), len(module.graph.find_nodes(op="call_function", target=MUL))
    compute_for_each(module.graph, None)
    module.graph.lint()
    module.recompile()
    return (
        before,
        module(*args),
        len(module.graph.find_nodes(op="call_function", target=MUL)) - count,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_reader_has_its_own_and_nothing_changes(dtype):
    before, after, more = rewritten(
        row_sums, half(6, D, dtype=dtype), randn(D).float(), randn(6, D).float()
    )
    assert more == 1
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("dy", "gamma"),
    [
        (randn(6, D).float(), randn(D).float()),  # nothing narrower would be stored
        (half(6, D), randn(6, D).float()),  # two tiles
    ],
    ids=["32 bits", "two tiles"],
)
def test_what_is_no_widened_product_is_left_alone(dy, gamma):
    assert rewritten(row_sums, dy, gamma, randn(6, D).float())[2] == 0


def gradients(function, inputs):
    own = [x.detach().clone().requires_grad_() for x in inputs]
    function(*own).float().sum().backward()
    return [x.grad for x in own]


def test_the_gradient_of_a_first_norm_is_stored_in_16_bits():
    """The sums of a norm's gradient are in the epilogue, and what is stored for the rest of it is
    the gradient of the norm's result."""

    def function(x, gamma, w):
        return F.linear(F.rms_norm(x, (D,), gamma, 1e-2), w).sin()

    harness = Harness()
    inputs = [half(6, D), half(D), half(HIDDEN, D)]
    result = harness.train(function, *(x.requires_grad_() for x in inputs))
    result.float().sum().backward()
    (site,) = [site for site in harness.fused if site.role == "input gradient"]
    assert {store.dtype for store in site.program.stores} == {"bfloat16"}
    assert {reduce.axis for reduce in site.program.reduces} == {"row", "col"}
    assert "store-widened" in [stop.code for stop in site.stops]
    eager = gradients(function, inputs)
    for ours, theirs, exact in zip(
        inputs, eager, gradients(function, [x.double() for x in inputs]), strict=True
    ):
        assert (ours.grad - exact).norm() < 1.5 * (theirs - exact).norm()
