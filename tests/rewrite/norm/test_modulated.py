# SPDX-License-Identifier: Apache-2.0
"""LayerNorms that vectors of a time step modulate wait as those with a weight and a bias do."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_sizes, randn, side_by_side
from harness import Harness
from torch._dynamo.utils import counters
from zoo.diffusion import WIDTH, Block, Blocks

from coda_inductor import explain

D, EPS = WIDTH, 1e-2  # large, so that another eps shows


def modulated(change):
    """``change`` of (bare norm, scale, shift), behind another norm and before a product."""

    def function(x, w, scale, shift):
        x = x + F.linear(F.layer_norm(x, (D,)), w)
        return F.linear(change(F.layer_norm(x, (D,), eps=EPS), scale, shift), w)

    return function


TAKEN = {
    "as written": lambda n, scale, shift: n * (1 + scale) + shift,
    "a scale alone": lambda n, scale, shift: n * (1 + scale),
    "vectors": lambda n, scale, shift: n * scale[0, 0] + shift[0],
    "a shift alone": lambda n, scale, shift: n + shift,
}
LEFT = {
    "two readers": lambda n, scale, shift: n * scale + n.sin(),
    "one value a row": lambda n, scale, shift: n * scale[..., :1] + n[..., :1] * shift,
    "another factor": lambda n, scale, shift: torch.add(n, shift, alpha=2),
    "integers": lambda n, scale, shift: n * (scale > 0).long(),
    "of each row of a batch": lambda n, scale, shift: n * torch.cat([scale, shift]),
}


@pytest.mark.parametrize("table", [TAKEN, LEFT], ids=["taken", "left"])
def test_what_is_taken(table):
    vector = (1, 1, D)
    function, tensors = side_by_side(
        map(modulated, table.values()), (2, 6, D), (D, D), vector, vector
    )
    harness = check(function, *tensors)
    number = len(TAKEN) if table is TAKEN else 0
    assert harness.counts["modulated"] == harness.counts["layer_norm"] == number


@pytest.mark.parametrize(("norm", "weights", "dynamic"), [
    (F.rms_norm, 1, True), (F.rms_norm, 0, False), (F.layer_norm, 2, False),
])  # fmt: skip
def test_norms_with_a_weight_or_without(norm, weights, dynamic):
    """The shift meets the next product's weight, as R5's. Nothing is subtracted from rows for
    RMSNorm."""
    batch, kind = (2, "batch") if dynamic else (1, "row")

    def function(x, w, scale, shift, bias, *vectors):
        x = x + F.linear(norm(x, (D,)), w)
        n = norm(x, (D,), *vectors)
        return F.linear(n * (1 + scale[:, None]) + shift[:, None], w, bias)

    inputs = randn(2, 256, D), randn(D, D), randn(batch, D), randn(batch, D), randn(D)
    harness = check(function, *inputs, *(randn(D) for _ in range(weights)), dynamic=dynamic)
    assert harness.counts["modulated"] == harness.counts[norm.__name__] == 1
    kinds = [o.kind for o in harness.fused[-1].program.operands]
    assert norm is F.layer_norm or kinds == ["col", kind]  # rstd, offset


@pytest.mark.parametrize(
    ("norm", "batch", "shifted", "waits"),
    [(F.rms_norm, 16, True, False), (F.layer_norm, 2, False, True)],
)
def test_weights_are_read_again_for_each_row_of_a_batch(norm, batch, shifted, waits):
    """Where something is added to a product; with 16 that costs more than is saved."""
    m, d = 16384, 4096

    def function(x, w, scale, shift):
        x = x + F.linear(norm(x, (d,)), w)
        n = norm(x, (d,)) * scale[:, None]
        return x, F.linear(n + shift[:, None] if shifted else n, w).cumsum(1)

    shapes = (batch, m // batch, d), (d, d), (batch, d), (batch, d)
    args = [torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
    with torch.no_grad():
        found = explain(function, *args, gpu="h200")
    sites = found.sites if norm is F.layer_norm else found.sites[-1:]
    assert {norm.__name__ in site.patterns for site in sites} == {waits}
    assert ("layer-norm-slower" in {why.code for why in found.near_misses}) != waits


def test_a_float64_scale_is_not_narrowed():
    def function(x, w, scale):
        return F.linear(F.layer_norm(F.linear(x, w), (D,)) * scale, w.double())

    inputs = randn(64, D).bfloat16(), randn(D, D).bfloat16(), randn(1, D).double()
    assert not check(function, *inputs, tolerance=0.1).counts["modulated"]


def test_vectors_of_a_batch():
    """All norms but the first wait, and gates are rows of a batch, in one graph for all sizes: what
    runs decides at each call whether a tile has more than two parts. Not of fewer than it has."""
    sizes = (2, 256), (3, 300), (5, 70)
    calls = [(randn(batch, rows, D), randn(batch, D)) for batch, rows in sizes]
    harness = check_sizes(Blocks(Block, 2).double(), *calls)
    assert counters["coda"] == {"modulated": 4, "layer_norm": 3, "residual": 4}
    kinds = [[o.kind for o in site.program.operands] for site in harness.fused]
    assert kinds[0] == ["row", "batch", "tile", "col", "batch"]  # bias, gate, x, mean, scale
    assert kinds[1] == ["col", "batch", "col", "batch"]  # m, sums of W, rstd, offset
    assert all(len(site.program.stores) <= 2 for site in harness.fused)
    few = check(Blocks(Block, 1).double(), randn(2, 100, D), randn(2, D))
    assert few.counts["modulated"] == few.counts["layer_norm"] == 0


def test_heads_of_symbolic_sizes():
    """The epilogue's view is of the sizes of what stands behind its operands."""

    def function(x, w, scale):
        x = x + F.linear(F.layer_norm(x, (D,)), w)
        return F.linear(F.layer_norm(x, (D,)) * scale[:, None], w).unflatten(2, (2, -1)).cumsum(1)

    harness = check(function, randn(2, 300, D), randn(D, D), randn(2, D), dynamic=True)
    assert harness.counts["layer_norm"] == 1


def test_one_plus_scale_is_not_rounded():
    def function(x, scale):
        return F.layer_norm(x, (D,), eps=EPS) * (1 + scale)

    x, scale = randn(64, D).bfloat16(), (0.01 * randn(1, D)).bfloat16()
    found = Harness().run(function, x, scale)
    want = function(x.double(), scale.double()).bfloat16()
    assert (found != want).double().mean() < 0.01  # one in three with 1 + scale in bfloat16
