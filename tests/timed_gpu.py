# SPDX-License-Identifier: Apache-2.0
"""A GPU with a clock of its own, for what measures times."""

from __future__ import annotations

import math
from types import SimpleNamespace

from coda_inductor.tune import load, timing


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
