# SPDX-License-Identifier: Apache-2.0
"""One case of suite `families`: torch.compile and ours, interleaved in one process.

Times, energy by the driver's counter, and where the time goes by kernel.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

import torch

from coda_inductor import report

from . import energy, families
from .environment import scrub
from .measure import Call, Variants, device, synchronize

if TYPE_CHECKING:
    from .cases import Case, Way

MIN_ROUNDS, MAX_ROUNDS = 11, 401
TOP_KERNELS = 8


def forget() -> None:
    """Free what the last case left: compiled code, reports and memory."""
    torch.compiler.reset()
    report.forget()
    if device() == "cuda":
        torch.cuda.empty_cache()


def decisions() -> dict | None:
    """What ours says of the graphs compiled since :func:`forget`: ``{"gemms", "fused": of them,
    "report": text}``; None where all came from a cache.
    """
    reports = report.reports()
    if not reports:
        return None
    return {
        "gemms": sum(len(graph.sites) for graph in reports),
        "fused": sum(graph.kernels for graph in reports),
        "report": "\n".join(scrub(graph.table()) for graph in reports),
    }


def run(case: Case, named: dict[str, Way], effort: tuple[float, float]) -> dict:
    """Measure one case.

    Args:
        case: a model and how it is called.
        named: its variants.
        effort: seconds of timing, all variants together, and of each one's energy (0 for none).

    Returns:
        what :meth:`Variants.measure` does, with ``"shape"``, ``"profile"``, ``"energy": {variant:
        joules of a call}``, ``"accuracy": {variant: errors by tensor}`` and ``"decisions":
        {variant: of ours}``.
    """
    seconds, energy_s = effort
    forget()
    variants = Variants()
    found = {}
    with torch.set_grad_enabled(case.training):
        work = families.Model(case)
        for name, way in named.items():
            report.forget()
            variants.add(name, functools.partial(work.compiled, way))
            if said := decisions():
                found[name] = said
        result = variants.measure(_rounds(variants.calls, seconds))
        result["profile"] = variants.profile(tuple(variants.calls), TOP_KERNELS)
        result["energy"] = _energy(variants, energy_s)
        errors = functools.partial(work.errors, variants.calls)
        result["accuracy"] = variants.attempt("accuracy", errors) or {}
    return result | {"shape": work.shape, "decisions": found}


def _rounds(calls: dict[str, Call], seconds: float) -> int:
    """As many rounds as fit into `seconds`, within limits; the calls also warm the clock."""
    if not calls:
        return MIN_ROUNDS
    for _ in range(2):  # the first for the clock
        start = time.perf_counter()
        for call in calls.values():
            call()
            call()
        synchronize()
    took = (time.perf_counter() - start) / 2
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / took)))


def _energy(variants: Variants, seconds: float) -> dict[str, dict]:
    """:func:`benchmarks.energy.joules` of every variant; none on a CPU."""
    if not seconds or device() != "cuda":
        return {}
    counter = variants.attempt("energy", energy.Counter)
    if counter is None:
        return {}
    found = {
        name: variants.attempt(
            f"energy of {name}", functools.partial(energy.joules, call, seconds, counter)
        )
        for name, call in variants.calls.items()
    }
    return {name: value for name, value in found.items() if value is not None}
