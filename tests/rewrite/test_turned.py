# SPDX-License-Identifier: Apache-2.0
"""Two turns that undo each other are none; one turn, or turns of something else, stay."""

from __future__ import annotations

import pytest
import torch
from checking import randn
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.rewrite.turned import turn_back

PERMUTE = torch.ops.aten.permute.default
TURNED = [1, 0]


def permute(x, dims=TURNED):
    return PERMUTE(x, dims)


def rewritten(function, *args):
    """(results before, results after, how many turns are left)."""
    module = make_fx(function, tracing_mode="fake")(*args)
    before = module(*args)
    for _ in range(2):  # the second time there is nothing to do
        turn_back(module.graph, None)
        module.graph.lint()
        left = len(module.graph.find_nodes(op="call_function", target=PERMUTE))
    module.recompile()
    return before, module(*args), left


def twice(a, b):
    return permute(permute(a @ b)).float()


def also_once(a, b):
    once = permute(a @ b)
    return permute(once).float(), once


@pytest.mark.parametrize(("function", "left"), [(twice, 0), (also_once, 1)])
def test_the_product_is_read_as_it_is(function, left):
    before, after, turns = rewritten(function, randn(6, 4).double(), randn(4, 5).double())
    assert turns == left
    for ours, theirs in zip(_list(after), _list(before), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: permute(permute(a.sin() @ b), [0, 1]) * 2,
        lambda a, b: permute(permute((a @ b).sin())) * 2,
        lambda a, b: permute((a @ b).unsqueeze(0), [1, 2, 0]) * 2,
    ],
    ids=["once", "no product", "three dimensions"],
)
def test_others_stay(function):
    before, after, turns = rewritten(function, randn(6, 4).double(), randn(4, 5).double())
    assert turns > 0
    assert torch.equal(before, after)


def _list(results):
    return results if isinstance(results, (tuple, list)) else [results]
