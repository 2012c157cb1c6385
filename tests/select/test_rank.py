# SPDX-License-Identifier: Apache-2.0
"""Which configs are worth a measurement, and which one runs without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured import B200, HOPPER, configs, figures, site
from programs import kinds

from coda_inductor.select.config import DEFAULTS
from coda_inductor.select.device import H100
from coda_inductor.select.rank import MANY, candidates

ONE = site("rms_partial")


@pytest.mark.parametrize("gpu", [HOPPER, B200], ids=["hopper", "blackwell"])
def test_every_legal_config_is_a_candidate_once(gpu):
    for kind in kinds():
        found = candidates(site(kind, n=8192), gpu)
        assert sorted(map(str, found)) == sorted(configs(site(kind, n=8192), gpu.arch))


def test_what_was_measured_nearest_comes_first_the_fastest_before():
    order = configs(ONE)
    us = {order[7]: 12.0, order[3]: 10.0, "64x16:1x1:co": 1.0, order[5]: 11.0}
    found = list(map(str, candidates(ONE, H100, figures(us))))
    assert found[:3] == [order[3], order[5], order[7]]
    assert sorted(found) == sorted(order)


def test_of_equals_the_first_in_order_runs_as_where_it_was_measured():
    order = configs(ONE)
    near = figures({order[4]: 10.0, order[2]: 10.1})
    assert str(candidates(ONE, H100, near)[0]) == near.best(order) == order[2]


def test_by_default_one_of_few_runs_that_fills_the_gpu():
    for m in (64, 1024, 8192):
        for kind in ("scale", "rms_partial", "swiglu", "norm_bwd_joined", "logsumexp"):
            assert candidates(site(kind, m=m, n=8192), H100)[0] in DEFAULTS
    large, few = (candidates(replace(ONE, m=m), H100)[0] for m in (8192, 1024))
    assert few.tile_m * few.tile_n < large.tile_m * large.tile_n


def test_other_ways_to_hand_out_tiles_are_among_many():
    assert any(config.dynamic for config in candidates(ONE, H100)[:MANY])
