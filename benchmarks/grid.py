# SPDX-License-Identifier: Apache-2.0
"""Suite `grid`: the layer of suite `layer` at many widths and rows, forward and training.

Every case compares torch.compile with ours, interleaved in one process: times, energy by the
driver's counter, and where the time goes by kernel. Weights and inputs are shared by the variants.
``grid_run`` is its command line.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from coda_inductor import report

from . import energy, gradients, layer, layer_train
from .environment import scrub
from .measure import Call, Variants, device, register, relative_error, synchronize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NORM = "hf"
MIN_ROUNDS, MAX_ROUNDS = 11, 101
TOP_KERNELS = 8
NAME_CHARACTERS = 160
FORWARD, TRAINING = "forward", "training"


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer: its widths (as :func:`benchmarks.layer.widths` takes them), rows M, "forward" or
    "training", and "bf16" or "fp16".
    """

    size: str
    rows: int
    mode: str
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """For example ``8B-4096-training-bf16``."""
        return f"{self.size}-{self.rows}-{self.mode}-{self.dtype}"

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case of a :attr:`name`; ValueError if it is none."""
        size, rows, mode, dtype = name.split("-")
        layer.widths(size)
        if mode not in (FORWARD, TRAINING) or dtype not in DTYPES:
            raise ValueError(name)
        return cls(size, int(rows), mode, dtype)


#: Each width has four rows of its own beside the fifth, which alternates.
ROWS = (512, 4096, 5000, 8192)
FIFTH = {"1B": 1000, "3B": 2048, "8B": 1000, "13B": 2048, "32B": 1000, "70B": 2048}
LONGEST = {"1B": 16384, "3B": 16384}
HALF = (("1B", 4096), ("8B", 5000), ("13B", 2048))


def every() -> list[Case]:
    """The cases of the grid: 70."""
    places = [(size, rows) for size, fifth in FIFTH.items() for rows in sorted((*ROWS, fifth))]
    places += list(LONGEST.items())
    modes = (FORWARD, TRAINING)
    cases = [Case(size, rows, mode) for size, rows in places for mode in modes]
    return cases + [Case(size, rows, mode, "fp16") for size, rows in HALF for mode in modes]


def chosen(patterns: Sequence[str]) -> list[Case]:
    """The cases whose names match one of the shell `patterns`; a full name of another case is that
    case. Raises ValueError for a pattern that matches nothing.
    """
    found: dict[Case, None] = {}
    for pattern in patterns:
        matches = [case for case in every() if fnmatch.fnmatchcase(case.name, pattern)]
        try:
            found |= dict.fromkeys(matches or [Case.parse(pattern)])
        except (ValueError, KeyError):
            raise ValueError(f"{pattern!r} matches no case such as {every()[0].name}") from None
    return list(found)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a variant calls torch.compile: `backend`, and `mode` or `options`."""

    backend: str = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None


def ways(options: dict[str, Any] | None = None) -> dict[str, Way]:
    """The variants by name; "coda_options" is ours with `options`, if there are any."""
    found = {
        "compile": Way(),
        "coda": Way("coda"),
        "max_autotune": Way(mode="max-autotune-no-cudagraphs"),
    }
    if options:
        found["coda_options"] = Way("coda", options=options)
    return found


class Layer:
    """The layer of one case with its inputs: made once, used by all variants."""

    def __init__(self, case: Case):
        self.case = case
        self.training = case.mode == TRAINING
        self.block, x0, y = layer.build(case.size, case.rows, NORM, DTYPES[case.dtype])
        self.inputs = [x0, y]
        self.given: list[torch.Tensor] = []
        if self.training:
            self.inputs = [x0.requires_grad_(), y.requires_grad_()]
            self.given = layer_train.tangents(self.block, x0)

    def compiled(self, way: Way) -> Call:
        """The layer, or its forward and backward, compiled that way when first called."""
        register(way.backend)
        function = torch.compile(
            self.block, fullgraph=True, backend=way.backend, mode=way.mode, options=way.options
        )
        if self.training:
            return gradients.step(function, self.inputs, self.block.parameters(), self.given)
        return lambda: function(*self.inputs)


def prepare(case: Case, way: Way) -> dict | None:
    """Compile `case` and run it once, so that the compile caches hold it; what :func:`decisions`
    says of it.
    """
    forget()
    with torch.set_grad_enabled(case.mode == TRAINING):
        Layer(case).compiled(way)()
        synchronize()
    return decisions() if way.backend == "coda" else None


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
    case: Case,
    named: dict[str, Way],
    effort: Effort,
    progress: Path,
    skip: dict[str, str] | None = None,
) -> dict:
    """Measure one case.

    Args:
        case: the layer.
        named: its variants.
        effort: for how long.
        progress: as :class:`benchmarks.measure.Variants` takes it.
        skip: variants left out, with the reason.

    Returns:
        what :meth:`Variants.measure` does, with ``"shape"``, ``"profile"``, ``"energy": {variant:
        joules of a call}``, ``"difference": {variant: its worst relative difference from
        torch.compile}``, ``"accuracy": {}`` and ``"decisions": {variant: of ours}``.
    """
    forget()
    variants = Variants(progress, skip, effort.deadline)
    found = {}
    with torch.set_grad_enabled(case.mode == TRAINING):
        work = Layer(case)
        for name, way in named.items():
            report.forget()
            variants.add(name, functools.partial(work.compiled, way))
            if said := decisions():
                found[name] = said
        result = variants.measure(_rounds(variants.calls, effort.seconds))
        result["profile"] = variants.profile(tuple(variants.calls), TOP_KERNELS)
        for profile in result["profile"].values():
            for kernel in profile["kernels"]:
                kernel["name"] = kernel["name"][:NAME_CHARACTERS]
        result["energy"] = _energy(variants, effort.energy_s)
        result["difference"] = _differences(variants)
    d, f, kv = layer.widths(case.size)
    result["shape"] = {"M": case.rows, "d": d, "f": f, "kv": kv, "norm": NORM}
    return result | {"accuracy": {}, "decisions": found}


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


def _differences(variants: Variants) -> dict[str, float]:
    """The worst of the outputs' (training: gradients') relative differences from torch.compile."""
    if "compile" not in variants.calls:
        return {}
    truths = variants.calls["compile"]()
    return {
        name: max(relative_error(value, truth) for value, truth in zip(call(), truths, strict=True))
        for name, call in variants.calls.items()
        if name != "compile"
    }
