# SPDX-License-Identifier: Apache-2.0
"""Energy of calls, with a counter and a clock that stand in for a GPU's."""

from __future__ import annotations

import itertools
import sys
import time

import pytest
import torch
from benchmark_runs import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import energy, sustained
from coda_inductor.tune import load


class Meter:
    """A counter of energy that moves every 20 ms of `clock`, at `watts`."""

    def __init__(self, clock, watts: float):
        self.clock, self.watts = clock, watts

    def millijoules(self) -> int:
        return int(int(self.clock() / 0.02) * 0.02 * self.watts * 1e3)

    def mhz(self) -> int:
        return 1500 if self.clock() < 0.02 else 1700

    def limits(self) -> set[str]:
        return {"power"}


def test_joules_are_power_times_the_time_of_a_call():
    start = time.perf_counter()
    found = energy.joules(
        lambda: time.sleep(0.005), 1.0, Meter(lambda: time.perf_counter() - start, 300.0)
    )
    # A busy machine looks at the counter late, by a tenth of a second at times.
    assert found["watts"] == pytest.approx(300.0, rel=0.3)
    assert 0.4 < found["counted_s"] < 1.2
    assert found["joules"] >= 300.0 * 0.7 * 0.005
    assert found["joules"] * found["calls"] == pytest.approx(found["watts"] * 1.0, rel=0.4)
    assert found["mhz"] == 1700  # once it has settled
    assert found["limits"] == {"power": 1.0}


def test_ranks_repeat_a_call_as_often_as_each_other():
    """Where the counter stands still as well: the others' calls wait for this one's."""
    calls = []

    def call():
        calls.append(time.sleep(0.005))

    start = time.perf_counter()
    meter = Meter(lambda: time.perf_counter() - start, 300.0)
    assert energy.joules(call, 0.0, meter, calls=40)["calls"] == 40
    with pytest.raises(energy.EnergyError, match="moved 0 times"):
        energy.joules(call, 0.0, Meter(lambda: 1.0, 300.0), calls=40)
    assert len(calls) == 2 * (40 + 2)  # two that warm up


def test_candidates_repeat_in_both_orders_without_pauses():
    start, order = time.perf_counter(), []

    def candidate(name: str, seconds: float):
        def call():
            order.append(name)
            time.sleep(seconds)

        return call

    calls = {"a": candidate("a", 0.004), "b": load.in_turn([candidate("b", 0.008)] * 2)}
    meter = Meter(lambda: time.perf_counter() - start, 300.0)
    found = sustained.sustained(calls, 0.3, meter)
    assert [name for name, _ in itertools.groupby(order)] == ["a", "b", "a"]
    assert found["a"]["us"] < found["b"]["us"]
    assert 7.9e3 < found["b"]["us"] < 30e3
    assert found["a"]["joules"] == pytest.approx(found["a"]["us"] * found["a"]["watts"] / 1e6)


def test_a_counter_that_stands_still_is_an_error():
    with pytest.raises(energy.EnergyError, match="moved 0 times"):
        energy.joules(lambda: time.sleep(0.005), 0.1, Meter(lambda: 1.0, 300.0))


def test_without_a_gpu_there_is_no_counter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(energy.EnergyError, match="no CUDA device"):
        energy.Counter()
