# SPDX-License-Identifier: Apache-2.0
"""Which configs are worth a measurement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from measured import B200, HOPPER, configs, site

from coda_inductor.select.config import Config
from coda_inductor.select.device import H100
from coda_inductor.select.model import kernel_us
from coda_inductor.tune.rank import MANY, SOME, candidates

ONE = site("rms_partial")


def expected(of, config, gpu=H100) -> float:
    return kernel_us(of.program, config, of.m, of.n, of.k, of.terms, gpu)


@pytest.mark.parametrize("kind", ["scale", "swiglu", "norm_bwd_joined", "logsumexp"])
def test_the_most_promising_come_first(kind):
    wanted = site(kind, n=8192)
    found = candidates(wanted, H100, None)
    times = [expected(wanted, config) for config in found]
    known = [us for us in times if math.isfinite(us)]
    assert known == sorted(known)
    assert len(known) > 5
    assert sorted(map(str, found)) == sorted(configs(wanted))


@pytest.mark.parametrize("most", [1, SOME, MANY])
def test_at_most_so_many(most):
    everything = candidates(ONE, H100, None)
    assert candidates(ONE, H100, most) == everything[:most]
    assert sorted(map(str, everything)) == sorted(configs(ONE))
    assert len(everything) > MANY > SOME


def test_a_config_that_the_model_does_not_know_comes_after_its_twin():
    found = candidates(ONE, H100, None)
    twins = [c for c in found if c.dynamic and math.isinf(expected(ONE, c))]
    assert twins
    for twin in twins:
        plain = replace(twin, dynamic=False)
        assert expected(ONE, plain) < math.inf
        after, until = found.index(plain), found.index(twin)
        assert after < until
        near = [expected(ONE, c) for c in found[after:until] if math.isfinite(expected(ONE, c))]
        assert max(near) <= 1.01 * expected(ONE, plain)
        later = [expected(ONE, c) for c in found[until:] if math.isfinite(expected(ONE, c))]
        assert min(later, default=math.inf) >= 1.01 * expected(ONE, plain)


@pytest.mark.parametrize("gpu", [HOPPER, B200], ids=["hopper", "blackwell"])
def test_without_a_table_tiles_that_fill_the_gpu_come_first(gpu):
    found = candidates(ONE, gpu, None)
    assert sorted(map(str, found)) == sorted(configs(ONE, gpu.arch))
    assert found == candidates(ONE, gpu, None)
    first = found[0]
    assert first.tile_m * first.tile_n >= 128 * 128
    few = candidates(replace(ONE, m=128), gpu, None)[0]  # 128 x 2048 on 132 processors
    assert few.tile_m * few.tile_n < first.tile_m * first.tile_n


def test_what_is_not_legal_is_no_candidate():
    paired = site("swiglu", n=8192)
    assert Config.parse("192x128:2x1:pp") not in candidates(paired, HOPPER, None)
    assert Config.parse("192x128:2x1:pp") in candidates(site(), HOPPER, None)
