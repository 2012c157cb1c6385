# SPDX-License-Identifier: Apache-2.0
"""What the times of several rounds say, and times under load, on a GPU whose power is limited."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from coda_inductor.tune import load, timing
from coda_inductor.tune.timing import Times, evaluated


class Gpu:
    """A GPU that does what it is given in order, and a host that takes its time to give it:
    microseconds. It stands for ``torch.cuda`` and ``time`` where times are measured."""

    def __init__(self):
        self.host = self.busy_until = 0.0

    def install(self, patch) -> None:
        """Let times be measured on it."""
        cuda = SimpleNamespace(Event=self.event, synchronize=self.synchronize)
        for module in (timing, load):
            patch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
        patch.setattr(timing, "time", self)
        patch.setattr(timing, "_flush", lambda: lambda: self.draw(timing._HOST_US, 300.0))

    def launch(self, us: float, host_us: float = 5.0) -> None:
        self.host += host_us
        self.busy_until = max(self.busy_until, self.host) + us

    def draw(self, us: float, _watts: float) -> None:
        self.launch(us)

    def perf_counter(self) -> float:
        return 1e-6 * self.host

    monotonic = perf_counter

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until)

    def event(self, enable_timing: bool):
        gpu = self

        class Event:
            def record(self):
                self.at = max(gpu.busy_until, gpu.host)

            def elapsed_time(self, other):
                return 1e-3 * (other.at - self.at)

        return Event()


class LimitedGpu(Gpu):
    """One whose power has a limit: where the mean power of the last tenth of a second is above it,
    everything takes as much longer."""

    def __init__(self, limit: float = 700.0, settles_us: float = 25e3):
        super().__init__()
        self.limit, self.settles_us, self.mean = limit, settles_us, 0.0

    def draw(self, us: float, watts: float) -> None:
        """A launch that takes so long, and draws so much, at the full clock."""
        self.mean += (watts - self.mean) * (1 - math.exp(-us / self.settles_us))
        self.launch(us * max(1.0, self.mean / self.limit))


def rounds(count: int, noise: float = 0.0, seed: int = 0, **us: float) -> dict[str, list[float]]:
    """So many times of each function, with independent noise."""
    draw = random.Random(seed)  # noqa: S311
    return {
        name: [value * (1 + draw.gauss(0, noise)) for _ in range(count)]
        for name, value in us.items()
    }


def test_a_clock_that_changes_all_changes_no_comparison():
    """Twice as slow at the end as at the start, and each round its own clock."""
    still = rounds(40, 0.001, a=100.0, b=103.0)
    clock = [1 + index / 39 for index in range(40)]
    drifted = {n: [v * c for v, c in zip(vs, clock, strict=True)] for n, vs in still.items()}
    before, after = evaluated(still), evaluated(drifted)
    for name in "ab":
        assert after[name].spread == pytest.approx(before[name].spread)
    ratio = [found["b"].median / found["a"].median for found in (before, after)]
    assert ratio[1] == pytest.approx(ratio[0])
    assert ratio[1] == pytest.approx(1.03, abs=0.002)
    assert after["a"].median == pytest.approx(150.0, rel=0.02)
    quiet = rounds(15, a=10.0, b=11.0)
    quiet["a"][7] = 500.0  # something else disturbs one round
    assert evaluated(quiet)["a"].median == pytest.approx(10.0)


def test_the_spread_is_what_a_median_may_be_off():
    """About 19 of 20 measurements are within it, of a quarter of them not all half as near."""
    off, spreads = [], []
    for seed in range(200):
        found = evaluated(rounds(36, 0.02, seed, a=50.0, b=50.0, c=50.0, d=50.0))["a"]
        off.append(abs(found.median / 50 - 1))
        spreads.append(found.spread)
    typical = sorted(spreads)[100]
    assert sum(x <= typical for x in off) / 200 > 0.8
    assert sum(x <= typical / 4 for x in off) / 200 < 0.8


@pytest.mark.parametrize(
    ("spreads", "counts", "tries"),
    [([0.01], 0.01, 1), ([0.3, 0.02], 0.02, 2), ([0.3, 0.1, 0.2, 0.0], 0.1, 3)],
)
def test_what_is_disturbed_is_measured_again(spreads, counts, tries):
    """A few times; the calmest counts, also if none was calm."""
    tried = []

    def measure():
        tried.append(1)
        spread = spreads[len(tried) - 1]
        return {"a": Times(50.0, spread), "b": Times(60.0, spread), "c": Times(9.0, 5.0)}

    found = timing.steady(measure)
    assert timing.typical(found) == counts
    assert len(tried) == tries


@pytest.mark.parametrize("host_us", [10.0, 200.0, 1000.0])
def test_no_time_holds_a_wait_for_the_host(host_us, monkeypatch):
    """Two launches, each of which takes the host that long and the GPU 20 us."""
    gpu = Gpu()
    gpu.install(monkeypatch)
    calls = {
        "slow": lambda: (gpu.launch(20, host_us), gpu.launch(20, host_us)),
        "quick": lambda: gpu.launch(30),
    }
    found = timing.measure(calls)
    assert found["slow"].median == pytest.approx(40)
    assert found["quick"].median == pytest.approx(30)


@pytest.fixture
def gpu(monkeypatch):
    made = LimitedGpu()
    made.install(monkeypatch)
    return made


def test_what_draws_less_wins_under_load_though_not_with_pauses(gpu):
    """300 us at 1000 W and 310 us at 750 W: joules decide where the power is limited."""
    calls = {"hot": lambda: gpu.draw(300, 1000.0), "cool": lambda: gpu.draw(310, 750.0)}
    rested = timing.measure(calls)
    assert rested["hot"].median < rested["cool"].median
    us = {name: times.median for name, times in rested.items()}
    loaded = load.repeated(calls, us)
    assert loaded["hot"].median == pytest.approx(300 * 1000 / 700, rel=0.02)
    assert loaded["cool"].median == pytest.approx(310 * 750 / 700, rel=0.02)
    assert timing.typical(loaded) < 0.02
    calls = {"heats": lambda: gpu.draw(400, 1400.0), "rests": lambda: gpu.draw(400, 500.0)}
    loaded = load.repeated(calls, {"heats": 400.0, "rests": 400.0})
    assert loaded["rests"].median == pytest.approx(400, rel=0.02)  # the other's clock is gone
    assert loaded["heats"].median == pytest.approx(800, rel=0.02)


def test_the_spread_tells_rounds_that_differ(gpu):
    """A second round in which something else runs beside."""
    drawn, a_round = [], (load._SETTLE_S + load._COUNTED_S) / 400e-6

    def call():
        drawn.append(1)
        gpu.draw(400 if len(drawn) <= a_round else 440, 100.0)

    spread = load.repeated({"one": call}, {"one": 400.0})["one"].spread
    assert len(drawn) == 2 * a_round
    assert spread == pytest.approx(2 * 40 / 420 / 1.128 / 2**0.5, rel=0.1)


KNOWN = {"plain": 300.0, "unfused": 330.0, "a": 320.0, "b": 300.0, "c": 300.0 * (1 + load.NEAR) + 1}


def test_configs_near_the_fastest_are_tried_again():
    """But few, for a user waits for them, and no short calls, whose host may not be ahead."""
    assert load.contenders(KNOWN, ["a", "b", "c", "failed"]) == ["plain", "unfused", "b", "a"]
    products = {"plain": 300.0, "unfused": 330.0}
    for count, most in ((3, 2), (6, 3), (16, 6)):
        us = {str(number): 301.0 + number for number in reversed(range(count))}
        found = load.contenders(products | us, list(us))
        assert found == ["plain", "unfused", *(str(number) for number in range(most))]
    for short in ("plain", "unfused", "b"):
        assert load.contenders(KNOWN | {short: load.LEAST_US - 1}, ["a", "b"]) == []
    assert load.contenders(products, ["a"]) == []  # without a kernel


def test_what_is_far_behind_stays_as_far_behind():
    loaded = {name: Times(us, 0.01) for name, us in
              {"plain": 310.0, "unfused": 340.0, "a": 335.0, "b": 330.0}.items()}  # fmt: skip
    found = load.under_load(KNOWN, loaded)
    assert {name: found[name] for name in loaded} == {n: t.median for n, t in loaded.items()}
    assert found["c"] / found["b"] == pytest.approx(KNOWN["c"] / KNOWN["b"])


def test_tensors_take_turns_until_the_cache_is_full(monkeypatch):
    properties = SimpleNamespace(L2_cache_size=50 * 2**20)
    monkeypatch.setattr(load.torch.cuda, "get_device_properties", lambda: properties)
    assert [load.sets(mib * 2**20) for mib in (10, 100, 200, 1000)] == [20, 2, 1, 1]
    called = []
    call = load.in_turn([lambda: called.append("x"), lambda: called.append("y")])
    for _ in range(3):
        call()
    assert called == ["x", "y", "x"]
