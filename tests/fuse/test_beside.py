# SPDX-License-Identifier: Apache-2.0
"""Two GEMMs of one input that never meet, in one launch: the same function, and only where a
measurement says that it is faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, randn
from planning import D
from torch import nn

from coda_inductor.fuse import driver
from coda_inductor.fuse.emit import check_views
from coda_inductor.fuse.pair import beside

M, N, K = 6, 10, 8
SHARED, SINGLES = "k + v", {"k", "v"}


@pytest.fixture
def sharing(monkeypatch):
    """As if every shared launch won."""

    def shared(self, anchor, site):
        region = self._grown(lambda banned: beside(anchor, self.scope, banned))
        if region is None:
            return None
        check_views(region)
        return region, *self._judged(region, site)

    monkeypatch.setattr(driver._Planner, "_shared", shared)


def scaled(x, wk, wv):
    return F.linear(x, wk) * x[..., :1], F.linear(x, wv) * x[..., :1]


def dependent(x, wk, wv):
    k = F.linear(x, wk)
    return k.relu(), F.linear(x, wv + k.sum()).relu()


FLAT, BATCHES = (M, K), (2, 3, K)
#: Name -> (function of x and weights, the shape of x).
CASES = {
    "row scales": (scaled, FLAT),
    "batches": (scaled, BATCHES),
    "biases": (lambda x, wk, wv: (F.linear(x, wk, wk[:, 0]), F.linear(x, wv, wv[:, 1])), FLAT),
    "heads": (
        lambda x, wk, wv: [t.view(2, -1, 2, 5).transpose(1, 2) for t in scaled(x, wk, wv)],
        BATCHES,
    ),
    "two readers": (
        lambda x, wk, wv: (F.linear(x, wk).relu(), F.linear(x, wv).tanh(), F.linear(x, wv).neg()),
        FLAT,
    ),
    "one is read before the other is made": (
        lambda x, wk, wv: (F.linear(x, wk).relu().t() @ x, F.linear(x, wv + 1).relu()),
        FLAT,
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_shared_launch_is_the_same_function(name, dynamic, sharing):
    function, shape = CASES[name]
    model = Weights(function, randn(N, K), randn(N, K))
    harness = check(model, randn(*shape), dynamic=dynamic)
    shared = [site for site in harness.fused if site.program.paired]
    assert len(shared) == 1
    stores = {store.value for store in shared[0].program.stores}
    assert len(stores) == len(shared[0].program.stores) >= 2


REFUSED = {
    "one has nothing to absorb": lambda x, wk, wv: (F.linear(x, wk).relu(), F.linear(x, wv)),
    "other sizes": lambda x, wk, wv: scaled(x, wk, wv[1:]),
    "other inputs": lambda x, wk, wv: (F.linear(x, wk).relu(), F.linear(x + 1, wv).relu()),
    "one needs the other": dependent,
    "they meet": lambda x, wk, wv: F.linear(x, wk).relu() * F.linear(x, wv).relu(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_shares_no_launch(name, sharing, monkeypatch):
    monkeypatch.setattr(driver, "pair_with", lambda *_: None)
    harness = check(REFUSED[name], randn(M, K), randn(N, K), randn(N, K))
    assert harness.fused
    assert not any(site.program.paired for site in harness.fused)


class Keys(nn.Module):
    """Two projections of one input, as of keys and values."""

    def __init__(self):
        super().__init__()
        self.k, self.v = (nn.Linear(D, 1024, bias=False) for _ in range(2))

    def forward(self, x):
        return F.relu(self.k(x)), F.relu(self.v(x))


#: So many rows that the host is not the limit.
GPU = {"model": Keys, "m": 65536}


def test_one_launch_that_is_measured_faster_takes_the_place_of_two(plan):
    found = plan(lambda site: 80.0 if site.program.paired else 50.0, tune="always", **GPU)
    assert found.fused == {SHARED}
    assert {SHARED} | SINGLES <= set(found.measurer.names)
    assert not found.record.failed


@pytest.mark.parametrize("us", [99.0, 120.0])
def test_one_launch_that_is_no_faster_than_two_is_none(us, plan):
    """It beats the unfused way, and two kernels by less than measurements in two runs can say."""
    found = plan(lambda site: us if site.program.paired else 50.0, tune="always", **GPU)
    assert found.fused == SINGLES


def test_one_launch_is_compared_with_two_unfused_ones(plan):
    def us(site):
        return 90.0 if site.program.paired else 150.0

    assert plan(us, **GPU, tune="always").fused == {SHARED}


@pytest.mark.parametrize(
    "options", [{}, {"tune": "never"}, {"gate": "always"}, {"tune": "always", "disable": ["fuse"]}]
)
def test_nothing_is_measured_for_it_alone(options, plan):
    """By expected times it is never taken, and the default measures nothing for its sake."""
    found = plan(lambda _: 50.0, **GPU, **options)
    assert SHARED not in found.measurer.names
    assert SHARED not in found.sites


def test_what_there_was_no_time_for_stays_two(plan):
    found = plan(lambda site: None if site.program.paired else 50.0, tune="always", **GPU)
    assert found.fused == SINGLES
    assert found.record.failed


def test_a_pair_of_which_one_needs_the_other_is_none():
    """Also where they meet: gate and up."""

    def function(x, wk, wv):
        k = F.linear(x, wk)
        return k.relu() * F.linear(x, wv + k.sum()).relu()

    harness = check(function, randn(M, K), randn(N, K), randn(N, K))
    assert harness.fused
    assert not any(site.program.paired for site in harness.fused)


def test_in_training_the_gradients_do_not_share(plan):
    """They have an input each."""
    found = plan(
        lambda site: 80.0 if site.program.paired else 50.0,
        tune="always",
        train=True,
        **GPU,
    )
    assert SHARED in found.fused
    assert sum(site.program.paired for site in found.sites.values() if site.program) == 1
    assert torch.is_grad_enabled()
