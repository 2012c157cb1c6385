# SPDX-License-Identifier: Apache-2.0
"""Statistics are of what is stored: reductions read a stored value as memory holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from torch import nn

from coda_inductor.errors import ProgramError
from coda_inductor.program import (
    EpilogueProgram,
    Operand,
    Reduce,
    Step,
    Store,
    consistent,
    reference,
    simplify,
    verify,
)

M, N, K = 24, 40, 16


def program(*steps, stores, reduces, dtype="bfloat16"):
    operands = (Operand("t", "tile", dtype),)
    return EpilogueProgram(("acc",), dtype, operands, steps, stores, reduces)


HEAD = program(
    stores=(Store("out0", "acc", "bfloat16"),), reduces=(Reduce("lse", "acc", "row", "logsumexp"),)
)
NORM = program(
    Step("x", "add", ("acc", "t")),
    Step("sq", "mul", ("x", "x")),
    Step("h", "mul", ("x", 2.0)),
    stores=(Store("out0", "x", "bfloat16"), Store("out1", "h", "bfloat16")),
    reduces=(Reduce("part0", "sq"), Reduce("part1", "h")),
)


@pytest.mark.parametrize("original", [HEAD, NORM], ids=["head", "norm"])
def test_an_unrounded_statistic_is_refused_and_made_consistent(original):
    with pytest.raises(ProgramError, match="stored rounded"):
        verify(original)
    made = verify(simplify(consistent(original)))
    assert consistent(made) == made
    assert made.stores == original.stores
    a, b = (randn(*shape, dtype=torch.bfloat16) for shape in ((M, K), (K, N)))
    outputs = reference.run(made, [a], [b], [randn(M, N, dtype=torch.bfloat16)])
    stored = [x.float() for x in outputs[: len(made.stores)]]
    sums = outputs[len(made.stores) :]
    if original is HEAD:
        assert torch.equal(sums[0], stored[0].logsumexp(1, keepdim=True))
    else:
        assert torch.equal(sums[0], stored[0].square().sum(1, keepdim=True))
        assert torch.equal(sums[1], stored[1].sum(1, keepdim=True))  # of h, which is stored itself


def test_what_is_not_stored_is_not_rounded():
    original = replace(NORM, stores=(Store("out0", "x", "float32"),))
    assert verify(consistent(original)) == original
    elsewhere = replace(NORM, stores=NORM.stores[1:], reduces=NORM.reduces[:1])
    assert verify(consistent(elsewhere)) == elsewhere
    by_itself = program(
        Step("x", "round_bfloat16", ("acc",)),
        stores=(Store("out0", "x", "bfloat16"),),
        reduces=(Reduce("part0", "x"),),
    )
    assert verify(consistent(by_itself)) == by_itself


def test_a_long_chain_needs_no_recursion():
    steps = [Step("v0", "add", ("acc", 1.0))]
    steps += [Step(f"v{i}", "add", (f"v{i - 1}", 1.0)) for i in range(1, 3000)]
    last = steps[-1].name
    long = program(*steps, stores=(Store("o", "v0", "bfloat16"),), reduces=(Reduce("p", last),))
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
