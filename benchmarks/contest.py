# SPDX-License-Identifier: Apache-2.0
"""One case of suite `grid`, `families` or `fp8`: torch.compile and ours, interleaved in one
process.

Times, energy by the driver's counter, and where the time goes by kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from coda_inductor import report

from . import energy, families, fp8, grid, layer, models
from .environment import scrub
from .measure import Call, Variants, device, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .cases import Case, Way

MIN_ROUNDS, MAX_ROUNDS = 11, 401
TOP_KERNELS = 8
NAME_CHARACTERS = 160


@dataclasses.dataclass(frozen=True)
class Suite:
    """What differs between the suites.

    Attributes:
        every: its cases.
        check: raises KeyError for a size that no case can have.
        work: a case -> what is compiled; it has ``shape``, ``compiled(way)``, a function that
            returns tensors, ``difference(values, truths)`` of two such lists, and maybe
            ``errors(calls)``, by name: each one's errors against fp32, by tensor.
        variants: a case -> the names of its variants.
    """

    every: Callable[[], list[Case]]
    check: Callable[[str], Any]
    work: Callable[[Case], Any]
    variants: Callable[[Case], tuple[str, ...]]


SUITES = {
    "grid": Suite(grid.every, layer.widths, grid.Layer, grid.variants),
    "families": Suite(families.every, models.MODELS.__getitem__, families.Model, families.variants),
    "fp8": Suite(fp8.every, fp8.check, fp8.work, fp8.variants),
}


def prepare(suite: str, case: Case, way: Way) -> dict | None:
    """Compile `case` and run it once, so that the compile caches hold it; what :func:`decisions`
    says of it.
    """
    forget()
    with torch.set_grad_enabled(case.training):
        SUITES[suite].work(case).compiled(way)()
        synchronize()
    return decisions() if way.backend == "coda" else None


def first_call(suite: str, case: Case, way: Way) -> float:
    """Seconds that the first call of `case` takes, compilation and all; what belongs to no compiler
    (imports of libraries, cuBLAS) is done before.
    """
    with torch.set_grad_enabled(case.training):
        call = SUITES[suite].work(case).compiled(way)
        some = torch.ones(64, 64, device=device())
        torch.mm(some, some)
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
    return time.perf_counter() - start


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


@dataclasses.dataclass(frozen=True)
class Effort:
    """What a case may take.

    Attributes:
        seconds: of timing, all variants together.
        energy_s: of each variant for its energy; 0 for none.
        deadline: ``time.monotonic()`` after which no variant is prepared.
    """

    seconds: float
    energy_s: float
    deadline: float | None = None


def run(
    suite: str,
    case: Case,
    named: dict[str, Way],
    effort: Effort,
    progress: Path,
    skip: dict[str, str] | None = None,
) -> dict:
    """Measure one case.

    Args:
        suite: a key of SUITES.
        case: one of its cases.
        named: its variants.
        effort: for how long.
        progress: as :class:`benchmarks.measure.Variants` takes it.
        skip: variants left out, with the reason.

    Returns:
        what :meth:`Variants.measure` does, with ``"shape"``, ``"profile"``, ``"energy": {variant:
        joules of a call}``, ``"difference": {variant: its relative difference from
        torch.compile}``, ``"accuracy": {variant: errors by tensor}`` and ``"decisions":
        {variant: of ours}``.
    """
    forget()
    variants = Variants(progress, skip, effort.deadline)
    found = {}
    with torch.set_grad_enabled(case.training):
        work = SUITES[suite].work(case)
        for name, way in named.items():
            report.forget()
            variants.add(name, functools.partial(work.compiled, way))
            if said := decisions():
                found[name] = said
        result = variants.measure(_rounds(variants.calls, effort.seconds))
        turn = tuple(name for name, _ in _in_turn(variants.calls, case))
        result["profile"] = variants.profile(turn, TOP_KERNELS)
        for profile in result["profile"].values():
            for kernel in profile["kernels"]:
                kernel["name"] = kernel["name"][:NAME_CHARACTERS]
        result["energy"] = _energy(variants, case, effort.energy_s)
        result["difference"] = _differences(variants, work)
        result["accuracy"] = {}
        if hasattr(work, "errors"):
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


def _in_turn(calls: dict[str, Call], case: Case) -> list[tuple[str, Call]]:
    """The variants in their order or the reverse, by the case: what ran before them may change a
    GPU's clocks."""
    order = list(calls.items())
    return order[::-1] if sum(map(ord, case.name)) % 2 else order


def _energy(variants: Variants, case: Case, seconds: float) -> dict[str, dict]:
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
        for name, call in _in_turn(variants.calls, case)
    }
    return {name: value for name, value in found.items() if value is not None}


def _differences(variants: Variants, work: Any) -> dict[str, float]:
    if "compile" not in variants.calls:
        return {}
    truths = variants.calls["compile"]()
    return {
        name: work.difference(call(), truths)
        for name, call in variants.calls.items()
        if name != "compile"
    }
