# SPDX-License-Identifier: Apache-2.0
"""How a site runs: what was measured here decides, then what ships, then the roofline."""

from dataclasses import replace

import pytest
from measured import B200, HOPPER, borrowing, configs, figures, keyed, site, table
from programs import kinds

from coda_inductor.arch import BLACKWELL
from coda_inductor.gpu import H100
from coda_inductor.select import roofline
from coda_inductor.select.choice import candidates, select
from coda_inductor.select.config import Config
from coda_inductor.select.figures import signature
from coda_inductor.select.measurements import Measurements
from coda_inductor.select.roofline import MARGIN, around_us, products_us

ONE = site("rms_partial")
NEW = site("rms_partial", k=3072)  # of a size that no table has
FIRST, SECOND = configs(ONE)[:2]


@pytest.fixture
def here(tmp_path):
    return Measurements(HOPPER, tmp_path)


def test_measured_here_before_shipped_before_the_roofline(tmp_path):
    gpu = table(tmp_path / "tables", found=keyed(ONE, figures({SECOND: 40.0})))
    expected = select(ONE, gated=True, store=Measurements(borrowing(gpu), tmp_path))
    assert (expected.ground, expected.measured) == ("roofline", False)
    store = Measurements(gpu, tmp_path)
    shipped = select(ONE, gated=True, store=store)
    assert (shipped.how, shipped.config, shipped.fused_us) == ("kernel", SECOND, 40.0)
    assert (shipped.ground, shipped.measured, shipped.unfused_us) == ("shipped", True, 100.0)
    store.add(keyed(ONE, figures({FIRST: 50.0, SECOND: 60.0})))
    mine = select(ONE, gated=True, store=store)
    assert (mine.config, mine.fused_us, mine.ground, mine.measured) == (FIRST, 50.0, "here", True)


def test_the_config_is_that_of_the_nearest_measured_site_of_a_program_like_it(tmp_path):
    like = signature(ONE.program)
    rows = keyed(site("rms_partial", m=512), figures({FIRST: 50.0, SECOND: 60.0}, like=like))
    rows |= keyed(site("rms_partial", n=4096), figures({FIRST: 60.0, SECOND: 50.0}, like=like))
    store = Measurements(table(tmp_path / "tables", found=rows), tmp_path)
    for m, config in ((1024, FIRST), (4096, SECOND)):
        found = select(replace(ONE, m=m), gated=False, store=store)
        assert (found.config, found.ground) == (config, "roofline")


def test_what_was_measured_slower_stays_unfused_where_a_gate_asks(here):
    illegal = {"64x16:1x1:co": 1.0}
    here.add(keyed(ONE, figures({FIRST: 120.0, SECOND: 110.0} | illegal)))
    found = select(ONE, gated=True, store=here)
    assert (found.how, found.config, found.fused_us) == ("unfused", SECOND, 110.0)
    assert (found.refusal.code, found.refusal.failure) == ("measured-slower", False)
    found = select(ONE, gated=False, store=here)
    assert (found.how, found.config, found.refusal) == ("kernel", SECOND, None)
    failed = {FIRST: "wrong: out0 is off by 1 of its norm", SECOND: "hangs"}
    here.add(keyed(ONE, figures({}, failed=failed)))
    for gated in (True, False):
        found = select(ONE, gated=gated, store=here)
        assert (found.how, found.config, found.refusal.code) == ("unfused", "", "no-working-config")
        assert found.measured


def test_what_an_elementwise_kernel_reads_anyway_is_no_gain(here):
    """Unfused it is then the product and less around it than was measured."""
    after = replace(ONE, after=frozenset({"out0", "out1"}))
    around = around_us(after, HOPPER)
    found = figures({FIRST: 110.0}, unfused=1000.0, plain=100.0)
    here.add(keyed(ONE, found))
    assert select(ONE, gated=True, store=here).how == "kernel"
    lost = select(after, gated=True, store=here)
    assert lost.unfused_us == 100.0 + around
    assert around < 10
    assert lost.refusal.code == "measured-slower"
    here.add(keyed(ONE, replace(found, plain=200.0)))
    assert select(after, gated=True, store=here).how == "kernel"


def test_what_was_not_measured_must_win_by_a_margin(monkeypatch):
    """What is expected to lose by far is measured on demand only."""
    unfused = products_us(NEW, H100) + around_us(NEW, H100)
    for factor, code in ((0.999, None), (1.001, "expected-slower")):
        monkeypatch.setattr(roofline, "fused_us", lambda *_, us=factor * unfused / MARGIN: us)
        found = select(NEW, gated=True)
        assert (found.how == "kernel", found.refusal and found.refusal.code) == (not code, code)
        assert select(NEW, gated=False).how == "kernel"


def test_beside_collectives_tiles_come_from_a_counter(tmp_path):
    """Blackwell's always do."""
    store = Measurements(table(tmp_path / "tables"), tmp_path)
    store.add(keyed(ONE, figures({FIRST: 50.0})))
    alone = select(ONE, gated=True, store=store)
    beside = select(replace(ONE, crowded=True), gated=True, store=store)
    twin = str(Config.parse(alone.config).dynamic_twin())
    assert not Config.parse(alone.config).dynamic
    assert beside == replace(alone, config=twin)
    store.add(keyed(ONE, figures({alone.config: 50.0}, failed={twin: "wrong"})))
    assert select(replace(ONE, crowded=True), gated=True, store=store).config == alone.config
    store, order = Measurements(B200, tmp_path), configs(replace(ONE, arch=BLACKWELL))
    mine = replace(ONE, arch=BLACKWELL, crowded=True)
    assert select(mine, gated=False, store=store).config == order[0]
    store.add(keyed(ONE, figures({order[1]: 50.0})))
    assert select(mine, gated=True, store=store).config == order[1]


def test_every_legal_config_is_a_candidate_once_the_nearest_fastest_first():
    for gpu in (HOPPER, B200):
        for kind in kinds():
            of = site(kind, n=8192, arch=gpu.arch)
            assert sorted(map(str, candidates(of, gpu))) == sorted(configs(of))
    order = configs(ONE)
    us = {order[7]: 12.0, order[3]: 10.0, "64x16:1x1:co": 1.0, order[5]: 11.0}
    found = list(map(str, candidates(ONE, H100, (ONE, figures(us)))))
    assert found[:3] == [order[3], order[5], order[7]]
