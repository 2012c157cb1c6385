# SPDX-License-Identifier: Apache-2.0
"""Joules of a call, by the driver's counter of the GPU's energy (NVML), the clock it ran at, and
what kept the clock down.

The counter moves in steps some tens of milliseconds apart, so the energy of a loop is not its
difference between begin and end: the power is taken between two of its steps, while the call
repeats without a pause, and multiplied by the time of one call.
"""

import collections
import importlib
import statistics
import threading
import time

import torch

from .measure import Call, synchronize

POLL_S = 0.002
#: What is queued at a time: the device must not run dry, nor be busy long after the loop.
BATCH_S = 0.01
#: Share of the loop after which steps of the counter count: the power has settled.
SETTLED = 0.2

#: What keeps clocks down under a load, by the end of NVML's name for it.
_LIMITS = {"SwPowerCap": "power", "HwSlowdown": "hardware", "SwThermalSlowdown": "heat",
           "HwThermalSlowdown": "heat", "HwPowerBrakeSlowdown": "power brake"}  # fmt: skip

#: When it was read, MHz, and what keeps it down.
Clock = tuple[float, int, set[str]]


class EnergyError(Exception):
    """The driver does not tell the energy; says why."""


class Counter:
    """The energy that the first CUDA device of this process has used. Raises EnergyError where
    there is no such device, no NVML (``pip install nvidia-ml-py``), or no counter."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise EnergyError("no CUDA device")
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.millijoules(), self.mhz(), self.limits()
        except Exception as error:  # noqa: BLE001  NVML's errors have no common base without it
            raise EnergyError(f"no NVML: {error!r}") from None

    def millijoules(self) -> int:
        """Since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device)

    def mhz(self) -> int:
        """The clock of its processors, at this moment."""
        return self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM)

    def limits(self) -> set[str]:
        """What keeps that clock down, at this moment."""
        now = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device)
        names = {f"nvmlClocksThrottleReason{name}": limit for name, limit in _LIMITS.items()}
        return {limit for name, limit in names.items() if now & getattr(self._nvml, name)}


def joules(call: Call, seconds: float, counter: Counter) -> dict:
    """Energy of one of many calls in a row.

    Args:
        call: what to repeat.
        seconds: how long to repeat it; at least 0.3 for an H100's counter.
        counter: anything whose ``millijoules()`` is the energy used so far, ``mhz()`` the clock and
            ``limits()`` what keeps it down.

    Returns:
        ``{"joules": of one call, "watts", "mhz": median clock, "limits": {what kept it down: share
        of the time}, "calls": repeated, "counted_s": seconds between the first and last step of the
        counter that count}``. Raises EnergyError where it moved less than twice meanwhile, after
        all calls.
    """
    call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    batch = max(1, int(BATCH_S / (time.perf_counter() - start)))
    steps: list[tuple[float, int]] = []
    clocks: list[Clock] = []
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(counter, steps, clocks, done), daemon=True)
    watcher.start()
    start, count, before = time.perf_counter(), 0, None
    while time.perf_counter() - start < seconds:
        for _ in range(batch):
            call()
        count += batch
        before = _queued(before)
    last = time.perf_counter()
    synchronize()
    took = time.perf_counter() - start
    done.set()
    watcher.join()
    settled = start + SETTLED * (last - start)
    counted = [step for step in steps if settled <= step[0] <= last]
    if len(counted) < 2:
        raise EnergyError(f"the counter moved {len(counted)} times in {last - start:.2f} s")
    (first_s, first_mj), (last_s, last_mj) = counted[0], counted[-1]
    watts = (last_mj - first_mj) / 1e3 / (last_s - first_s)
    read = [(mhz, limits) for when, mhz, limits in clocks if settled <= when <= last]
    limited = collections.Counter(limit for _, limits in read for limit in limits)
    return {
        "joules": watts * took / count,
        "watts": watts,
        "mhz": statistics.median(mhz for mhz, _ in read),
        "limits": {limit: times / len(read) for limit, times in sorted(limited.items())},
        "calls": count,
        "counted_s": last_s - first_s,
    }


def _queued(before: torch.cuda.Event | None) -> torch.cuda.Event | None:
    """An event after what is queued, once the device is past `before`; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record()
    if before is not None:
        before.synchronize()
    return event


def _watch(
    counter: Counter,
    steps: list[tuple[float, int]],
    clocks: list[Clock],
    done: threading.Event,
) -> None:
    """Note when the counter moves, and to what, the clock and its limits, until `done`."""
    known = counter.millijoules()
    while not done.wait(POLL_S):
        value = counter.millijoules()
        if value != known:
            steps.append((time.perf_counter(), value))
            known = value
        clocks.append((time.perf_counter(), counter.mhz(), counter.limits()))
