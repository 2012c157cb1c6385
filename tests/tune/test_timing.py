# SPDX-License-Identifier: Apache-2.0
"""What the times of several rounds say."""

import random
from types import SimpleNamespace

import pytest

from coda_inductor.tune import timing
from coda_inductor.tune.timing import Times, evaluate


class Gpu:
    """A GPU that does what it is given in order, and a host that takes its time to give it:
    microseconds. It stands for ``torch.cuda`` and ``time`` where times are measured."""

    def __init__(self):
        self.host = self.busy_until = 0.0

    def install(self, patch) -> None:
        cuda = SimpleNamespace(Event=self.event, synchronize=self.synchronize)
        patch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
        patch.setattr(timing, "time", self)
        patch.setattr(timing, "_flush", lambda: lambda: self.launch(timing._HOST_US))

    def launch(self, us: float, host_us: float = 5.0) -> None:
        self.host += host_us
        self.busy_until = max(self.busy_until, self.host) + us

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


def rounds(count: int, noise: float = 0.0, **us: float) -> dict[str, list[float]]:
    """So many times of each function, with independent noise."""
    draw = random.Random(0)  # noqa: S311
    return {
        name: [value * (1 + draw.gauss(0, noise)) for _ in range(count)]
        for name, value in us.items()
    }


def test_a_clock_that_changes_all_changes_no_comparison():
    """Twice as slow at the end as at the start, and each round its own clock."""
    still = rounds(40, 0.001, a=100.0, b=103.0)
    clock = [1 + index / 39 for index in range(40)]
    drifted = {n: [v * c for v, c in zip(vs, clock, strict=True)] for n, vs in still.items()}
    before, after = evaluate(still), evaluate(drifted)
    assert after["a"].spread == pytest.approx(before["a"].spread)
    assert 0.0001 < before["a"].spread < 0.001
    assert after["b"].median / after["a"].median == pytest.approx(1.03, abs=0.002)
    quiet = rounds(15, a=10.0, b=11.0)
    quiet["a"][7] = 500.0  # something else disturbs one round
    assert evaluate(quiet)["a"].median == pytest.approx(10.0)


@pytest.mark.parametrize(("spreads", "counts"), [([0.3, 0.02], 0.02), ([0.3, 0.1, 0.2], 0.1)])
def test_what_is_disturbed_is_measured_again(spreads, counts):
    """A few times; the calmest counts, also if none was calm."""
    tries = iter(spreads)
    found = timing.steady(lambda: {"a": Times(50.0, next(tries))})
    assert timing.typical(found) == counts
    assert list(tries) == []


@pytest.mark.parametrize("host_us", [10.0, 1000.0])
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
