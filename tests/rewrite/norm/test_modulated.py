# SPDX-License-Identifier: Apache-2.0
"""RMSNorms that vectors of a time step scale wait as those with a weight do."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_sizes, randn, side_by_side
from harness import Harness
from torch._dynamo.utils import counters

D, EPS = 16, 1e-2  # large, so that another eps shows


def modulated(change):
    """``change`` of (bare norm, scale, shift), behind a product and before one."""

    def function(x, w, scale, shift):
        x = x + F.linear(x, w)
        return F.linear(change(F.rms_norm(x, (D,), eps=EPS), scale, shift), w)

    return function


TAKEN = {
    "as written": lambda n, scale, shift: n * (1 + scale),
    "a vector": lambda n, scale, shift: n * scale[0, 0],
}
LEFT = {
    "a shift too": lambda n, scale, shift: n * scale + shift,
    "two readers": lambda n, scale, shift: n * scale + n.sin(),
    "one value a row": lambda n, scale, shift: n * scale[..., :1],
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
    assert harness.counts["modulated"] == harness.counts["rms_norm"] == number


@pytest.mark.parametrize("weights", [0, 1])
def test_a_batch_of_any_size(weights):
    """Beside a weight of the norm's own, and without."""

    def function(x, scale, w, *vectors):
        x = x + F.linear(x, w)
        return F.linear(F.rms_norm(x, (D,), *vectors) * (1 + scale[:, None]), w)

    calls = [(randn(batch, rows, D), randn(batch, D)) for batch, rows in ((2, 256), (3, 300))]
    more = randn(D, D), *(randn(D) for _ in range(weights))
    check_sizes(lambda x, scale: function(x, scale, *more), *calls)
    assert counters["coda"]["modulated"] == counters["coda"]["rms_norm"] == 1


def test_one_plus_scale_is_not_rounded():
    def function(x, scale, w):
        return F.linear(F.rms_norm(x, (D,), eps=EPS) * (1 + scale), w)

    x, scale = randn(64, D).bfloat16(), (0.01 * randn(1, D)).bfloat16()
    eye = torch.eye(D, dtype=torch.bfloat16)
    found = Harness().run(function, x, scale, eye)
    want = function(x.double(), scale.double(), eye.double()).bfloat16()
    assert (found != want).double().mean() < 0.01  # one in three with 1 + scale in bfloat16
