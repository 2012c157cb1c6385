# SPDX-License-Identifier: Apache-2.0
"""Timers, profiler and memory: everything that touches a clock.

Variants are timed interleaved (one call of each per round, the order rotating), because the clock
of a GPU under load drifts by more than the differences measured here. On a CPU,
``time.perf_counter`` stands in for CUDA events.
"""

from __future__ import annotations

import functools
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from .environment import scrub

Call = Callable[[], Any]
Result = TypeVar("Result")
MIB = 2**20
LONG_MS = 20.0  # of a call: its host's time is found with fewer of them


def device() -> str:
    """``"cuda"`` where there is a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the device; raises what an earlier asynchronous call did wrong."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes of device memory held by tensors; 0 on a CPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def interleaved(calls: dict[str, Call], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Milliseconds of every call of every variant: `rounds` samples each, after `warmup` calls
    each.

    On CUDA nothing waits between calls, so that the host runs ahead and a sample is device time
    (see :func:`host_us` for the other side).
    """
    names = list(calls)
    for call in calls.values():
        for _ in range(warmup):
            call()
    synchronize()
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    on_gpu = device() == "cuda"
    now = mark if on_gpu else time.perf_counter
    for turn in range(rounds):
        for name in _rotated(names, turn):
            start = now()
            calls[name]()
            marks[name].append((start, now()))
    synchronize()
    return {
        name: [a.elapsed_time(b) if on_gpu else (b - a) * 1e3 for a, b in pairs]
        for name, pairs in marks.items()
    }


def mark() -> torch.cuda.Event:
    """An event at the end of what is queued."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _rotated(names: list[str], turn: int) -> list[str]:
    shift = turn % len(names)
    return names[shift:] + names[:shift]


def summary(samples_ms: list[float]) -> dict:
    """Median, 20th and 80th percentile and the samples themselves, in milliseconds."""
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    return {
        "median_ms": statistics.median(ordered),
        "p20_ms": ordered[round(0.2 * last)],
        "p80_ms": ordered[round(0.8 * last)],
        "samples_ms": [round(sample, 5) for sample in samples_ms],
    }


def host_us(call: Call, calls: int = 10) -> float:
    """Median microseconds the host needs to launch `call`, the device being idle."""
    times = []
    for _ in range(calls):
        synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    synchronize()
    return statistics.median(times)


def peak_mib(call: Call) -> float | None:
    """MiB that one call needs beyond what is allocated before it; None on a CPU."""
    if device() == "cpu":
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = allocated()
    call()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def kernel_times(call: Call, calls: int = 3, top: int = 15) -> dict:
    """Device time of one call by kernel name: ``{"total_us", "kernels": [{"name", "us",
    "calls"}]}``.

    Microseconds and launches are per call of `call`; only the `top` largest are listed. On a CPU:
    by aten op.
    """
    on_gpu = device() == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        for _ in range(calls):
            call()
        synchronize()

    def microseconds(event: Any) -> float:
        return (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / calls

    events = sorted(
        (e for e in trace.key_averages() if microseconds(e) > 0), key=microseconds, reverse=True
    )
    return {
        "total_us": sum(microseconds(event) for event in events),
        "kernels": [
            {"name": scrub(event.key), "us": microseconds(event), "calls": event.count / calls}
            for event in events[:top]
        ],
    }


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `reference` (same shape); computed in fp32."""
    difference = value.float() - reference.float()
    return (difference.norm() / reference.float().norm()).item()


def _reason(error: BaseException) -> str:
    """One line for a results file: kind and message, without Dynamo's advice on how to debug."""
    text = f"{type(error).__name__}: {error}".split("\n\nSet TORCHDYNAMO_VERBOSE")[0]
    return scrub(" ".join(text.split()))[:600]


def register(backend: str) -> None:
    """Make "coda" known to torch.compile where it is importable but not installed (entry point)."""
    if backend == "coda" and backend not in torch._dynamo.list_backends():
        from coda_inductor.backend import coda

        torch._dynamo.register_backend(coda, name=backend)


class Variants:
    """The calls of one comparison. A variant that fails leaves its error text; the others go on.

    Attributes:
        calls: name -> a callable that works.
        errors: name -> why there is none.
        held_mib: name -> MiB that stay allocated once it is prepared (weights, workspaces, graph
            pools).
    """

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.errors: dict[str, str] = {}
        self.held_mib: dict[str, float] = {}

    def attempt(self, name: str, work: Callable[[], Result]) -> Result | None:
        """`work()`, or None with the reason in `errors`; None also for a name that has one.

        Raises what the device raises if the failure also broke the CUDA context.
        """
        if name in self.errors:
            return None
        result = None
        try:
            result = work()
            synchronize()
        except Exception as error:  # noqa: BLE001  what it raises is its result
            traceback.print_exc()
            self.errors[name] = _reason(error)
            synchronize()
        return result

    def add(self, name: str, make: Callable[[], Call]) -> None:
        """Prepare the variant `make()`, call it once and keep it under `name`."""

        def prepare() -> Call:
            call = make()
            call()
            return call

        before = allocated()
        call = self.attempt(name, prepare)
        if call is not None:
            self.calls[name] = call
            self.held_mib[name] = (allocated() - before) / MIB

    def measure(self, rounds: int) -> dict:
        """Time all variants together, `rounds` samples of each.

        Returns:
            ``{"rounds", "variants": {name: measurements}, "errors": {name: text}}``; `errors` is
            the live attribute: what fails later shows up in it.
        """
        samples = interleaved(self.calls, rounds) if self.calls else {}
        variants = {
            name: summary(samples[name])
            | {
                "host_us": host_us(call, 3 if statistics.median(samples[name]) > LONG_MS else 10),
                "peak_mib": peak_mib(call),
                "held_mib": self.held_mib[name],
            }
            for name, call in self.calls.items()
        }
        return {"rounds": rounds, "variants": variants, "errors": self.errors}

    def profile(self, top: int = 15) -> dict:
        """:func:`kernel_times` of each variant that works, the `top` largest kernels of each:
        ``{name: profile}``.
        """
        found = {
            name: self.attempt(f"profile of {name}", functools.partial(kernel_times, call, top=top))
            for name, call in self.calls.items()
        }
        return {name: times for name, times in found.items() if times is not None}
