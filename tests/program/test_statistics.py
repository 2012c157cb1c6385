# SPDX-License-Identifier: Apache-2.0
"""Statistics are of what is stored: reductions read a stored value as memory holds it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from programs import parsed
from torch import nn

from coda_inductor.errors import ProgramError
from coda_inductor.program import consistent, reference, simplify, verify

M, N, K = 24, 40, 16
program = functools.partial(parsed, "bfloat16", "t:tile")
HEAD = program("", "acc", "lse:acc:row:logsumexp")
NORM = program("x add acc t; sq mul x x; h mul x 2", "x h", "part0:sq part1:h")


@pytest.mark.parametrize("original", [HEAD, NORM], ids=["head", "norm"])
def test_an_unrounded_statistic_is_refused_and_made_consistent(original):
    with pytest.raises(ProgramError, match="stored rounded"):
        verify(original)
    made = verify(simplify(consistent(original)))
    assert consistent(made) == made
    assert made.stores == original.stores
    a, b = (randn(*shape, dtype=torch.bfloat16) for shape in ((M, K), (K, N)))
    outputs = reference.run(made, [a], [b], [randn(M, N, dtype=torch.bfloat16)])
    x = outputs[0].float()
    if original is HEAD:
        assert torch.equal(outputs[1], x.logsumexp(1, keepdim=True))
    else:  # the second is of h, which is stored itself
        assert torch.equal(outputs[2], x.square().sum(1, keepdim=True))
        assert torch.equal(outputs[3], outputs[1].float().sum(1, keepdim=True))


def test_what_is_not_stored_is_not_rounded():
    original = replace(NORM, stores=(replace(NORM.stores[0], dtype="float32"),))
    elsewhere = replace(NORM, stores=NORM.stores[1:], reduces=NORM.reduces[:1])
    by_itself = program("x round_bfloat16 acc", "x", "part0:x")
    for each in (original, elsewhere, by_itself):
        assert verify(consistent(each)) == each


def test_a_long_chain_needs_no_recursion():
    steps = ";".join(["v0 add acc 1", *(f"v{i} add v{i - 1} 1" for i in range(1, 3000))])
    long = program(steps, "v0", "p:v2999")
    assert len(verify(consistent(long)).steps) == 2 * 3000


def fused(harness):
    return [site.program for site in harness.fused]


def test_gradients_of_biases_stay_more_exact_than_the_tile():
    """Nothing combines them with a tile again."""
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).bfloat16()
    x = randn(M, K, dtype=torch.bfloat16).requires_grad_()
    harness = check_gradients(model, x, tolerance=3e-2)
    columns = [p for p in fused(harness) if any(r.axis == "col" for r in p.reduces)]
    assert columns
    assert not any(s.op.startswith("round") for p in columns for s in p.steps)


def test_a_sum_over_rows_that_meets_its_tile_again_is_of_what_is_stored():
    def function(x, w):
        y = F.linear(x, w)
        return y.float() - y.float().sum(0) / M, y

    x, w = torch.ones(M, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16)
    harness = check(function, x, w, tolerance=1e-6)  # rows are equal: every difference is zero
    (found,) = fused(harness)
    assert any(s.op == "round_bfloat16" for s in found.steps)
