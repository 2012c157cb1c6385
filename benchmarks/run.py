# SPDX-License-Identifier: Apache-2.0
"""The command line of suite `families`: ``python -m benchmarks families --out DIR``.

Each case has a process of its own, so that one that dies costs nothing else. Into DIR, after every
case: ``results.json``, ``tables.txt`` and ``log.txt`` (all that the processes printed).
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from coda_inductor import report as reports

from . import energy, environment, families, report
from .cases import Case, Way, chosen, json_object, ways
from .environment import REPOSITORY, scrub
from .measure import Call, Variants, device, synchronize

MIN_ROUNDS, MAX_ROUNDS = 11, 401
TOP_KERNELS = 8


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks families", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results")
    add(
        "--cases",
        type=_list,
        default=["*"],
        help="shell patterns of names, such as 'bert-*,*-training-*'; a full name such as "
        "8B-4096-training-bf16 adds a case that is none of the suite's",
    )
    add("--variants", type=_list, default=["*"], help="patterns of the variants (default: all)")
    add("--options", type=json_object, help="JSON; ours with these options is a variant of its own")
    add("--max-autotune", action="store_true", help="measure it as well; it takes long to compile")
    add("--deadline", type=float, default=3600.0, help="seconds for everything (default 3600)")
    add("--timeout", type=float, default=300.0, help="seconds for one case (default 300)")
    add("--seconds", type=float, default=0.8, help="timing of one case (default 0.8)")
    add("--energy", type=float, default=0.4, help="seconds a variant; 0 for none (default 0.4)")
    add("--caches", type=Path, help="folder of the compile caches, kept (default: a fresh one)")
    add("--commit", help="measured commit, where the tree is a copy without .git")
    return parser


def _variants(case: Case, options: argparse.Namespace) -> dict[str, Way]:
    """The variants measured of a case."""
    known = ways(options.options)
    names = [name for name in families.variants(case) if name in known]
    wanted = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in options.variants)]
    return {n: known[n] for n in wanted if n != "max_autotune" or options.max_autotune}


def measure(case: Case, options: argparse.Namespace, caches: Path, until: float) -> dict:
    """The result of a case, in a process of its own, or ``{"error": why there is none}``."""
    named = {n: dataclasses.asdict(way) for n, way in _variants(case, options).items()}
    variables = {name: str(caches / name.lower()) for name in environment.CACHES}
    if (left := min(options.timeout, until - time.monotonic())) <= 0:
        return {"error": "no time was left"}
    with tempfile.TemporaryDirectory() as name, (options.out / "log.txt").open("ab") as log:
        folder = Path(name)
        order = {"case": case.name, "ways": named}
        order |= {"seconds": options.seconds, "energy_s": options.energy}
        (folder / "order.json").write_text(json.dumps(order))
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.run", name],
            cwd=REPOSITORY, env={**os.environ, **variables},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"error": f"killed after {left:.0f} s"}
        if code:
            return {"error": f"exit status {code}; the log says why"}
        return json.loads((folder / "result.json").read_text())


def work(folder: Path) -> None:
    """The process of a case: measure what the order in `folder` says."""
    start = time.monotonic()
    order = json.loads((folder / "order.json").read_text())
    named = {name: Way(**way) for name, way in order["ways"].items()}
    effort = (order["seconds"], order["energy_s"])
    result = contest(Case.parse(order["case"]), named, effort)
    result["seconds"] = time.monotonic() - start
    (folder / "result.json").write_text(json.dumps(result))


def forget() -> None:
    """Free what the last case left: compiled code, reports and memory."""
    torch.compiler.reset()
    reports.forget()
    if device() == "cuda":
        torch.cuda.empty_cache()


def decisions() -> dict | None:
    """What ours says of the graphs compiled since :func:`forget`: ``{"gemms", "fused": of them,
    "report": text}``; None where all came from a cache.
    """
    made = reports.reports()
    if not made:
        return None
    return {
        "gemms": sum(len(graph.sites) for graph in made),
        "fused": sum(graph.kernels for graph in made),
        "report": "\n".join(scrub(graph.table()) for graph in made),
    }


def contest(case: Case, named: dict[str, Way], effort: tuple[float, float]) -> dict:
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
            reports.forget()
            variants.add(name, functools.partial(work.compiled, way))
            if said := decisions():
                found[name] = said
        result = variants.measure(_rounds(variants.calls, seconds))
        result["profile"] = variants.profile(TOP_KERNELS)
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


def _line(result: dict) -> str:
    if "error" in result:
        return result["error"]
    known = [f"{name} {found['median_ms']:.3f}" for name, found in result["variants"].items()]
    if ratio := report.speedup(result):
        known.append(f"coda at {ratio:.3f}")
    known += [f"{name}: {why}" for name, why in result["errors"].items()]
    return ", ".join(known) + f" ({result['seconds']:.1f} s)"


def main(arguments: list[str]) -> None:
    """Run the suite; files and terminal as the docstring above says."""
    until = time.monotonic()
    parser = _parser()
    options = parser.parse_args(arguments)
    until += options.deadline
    try:
        cases = chosen(options.cases, families.every())
    except ValueError as error:
        parser.error(f"--cases: {error}")
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    described = environment.describe(["families", *arguments], options.commit)
    results: dict = {"environment": described, "families": {}}
    with tempfile.TemporaryDirectory() as folder:
        caches = (options.caches or Path(folder)).resolve()
        for case in cases:
            result = results["families"][case.name] = measure(case, options, caches, until)
            (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
            (out / "tables.txt").write_text(report.short(results) + "\n")
            print(f"{case.name}: {_line(result)}", flush=True)
    print("\n" + report.short(results))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
