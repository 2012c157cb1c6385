# SPDX-License-Identifier: Apache-2.0
"""The command line of suites `grid`, `families` and `fp8`: ``python -m benchmarks grid --out DIR``.

First many processes compile all cases into shared caches; then one measures them. With --cold, each
variant is compiled before that in a process of its own with empty caches. Into DIR, after
every case: ``results.json``, ``tables.txt`` and ``profiles.txt`` as the other suites, ``log.txt``.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from . import contest, environment, report
from .cases import Case, chosen, json_object, ways
from .environment import REPOSITORY
from .runner import CACHE_VARIABLES, Files, last_line

if TYPE_CHECKING:
    from collections.abc import Callable

#: Share of the time after which compiling ahead is given up.
AHEAD = 0.5
#: Of each process that compiles: one thread, and few workers of ours.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_WARM_POOL": "0", "CODA_COMPILE_WORKERS": "2"}
#: Beyond the deadline, for the case that is being measured.
GRACE_S = 20.0
POLL_S = 0.5


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _parser(suite: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {suite}", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results")
    add(
        "--cases",
        type=_list,
        default=["*"],
        help="shell patterns of names, such as '8B-*-training-*,1B-*'; a full name of a case "
        "that is none of the suite's adds that one; a layer's width is a name or d/f/kv",
    )
    add("--variants", type=_list, default=["*"], help="patterns of the variants (default: all)")
    add("--options", type=json_object, help="JSON; ours with these options is a variant of its own")
    add(
        "--max-autotune",
        type=_list,
        default=[],
        help="patterns of the cases that max-autotune is measured for; it takes long to compile",
    )
    add("--deadline", type=float, default=460.0, help="seconds for everything (default 460)")
    add(
        "--late",
        type=_list,
        default=["max_autotune"],
        help="variants compiled by the measuring process, alone on the GPU: those that choose "
        "kernels by measuring while they compile (default max_autotune)",
    )
    cores = len(os.sched_getaffinity(0))
    add(
        "--jobs",
        type=int,
        default=max(1, cores - 2),
        help="processes that compile ahead; 0 for none (default: the cores less two)",
    )
    add("--seconds", type=float, default=0.8, help="timing of one case (default 0.8)")
    add(
        "--cold",
        type=_list,
        default=[],
        help="patterns of the cases whose variants' first calls are timed, a process with empty "
        "caches each; with --cases '' nothing else is measured",
    )
    add("--energy", type=float, default=0.4, help="seconds a variant; 0 for none (default 0.4)")
    add("--caches", type=Path, help="folder of the compile caches, kept (default: a fresh one)")
    add("--commit", help="measured commit, where the tree is a copy without .git")
    return parser


@dataclasses.dataclass
class Run:
    """One run of a suite: its options, time and results."""

    suite: str
    options: argparse.Namespace
    arguments: list[str]
    deadline: float
    folder: Path

    def __post_init__(self) -> None:
        self.cases = [
            case.name for case in chosen(self.options.cases, self.about.every(), self.about.check)
        ]
        self.colds = [
            case.name for case in chosen(self.options.cold, self.about.every(), self.about.check)
        ]
        self.cold_s: dict[str, dict[str, float | str]] = {}
        self.caches = (self.options.caches or self.folder / "caches").resolve()
        self.ways = ways(self.options.options)
        self.results: dict = {
            "environment": environment.describe([self.suite, *self.arguments], self.options.commit),
            self.suite: {},
        }

    @property
    def about(self) -> contest.Suite:
        """The suite that is run."""
        return contest.SUITES[self.suite]

    def variants(self, case: str) -> list[str]:
        """The variants measured of a case."""
        slow = any(fnmatch.fnmatchcase(case, pattern) for pattern in self.options.max_autotune)
        names = [name for name in self.about.variants(Case.parse(case)) if name in self.ways]
        wanted = self.options.variants
        names = [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in wanted)]
        return [name for name in names if name != "max_autotune" or slow]

    def order(self, what: str, **fields: Any) -> Path:
        """The folder of a process, its order in it."""
        folder = Path(tempfile.mkdtemp(prefix=what, dir=self.folder))
        named = {name: dataclasses.asdict(way) for name, way in self.ways.items()}
        Files(folder).order.write_text(
            json.dumps({"what": what, "suite": self.suite, "ways": named, **fields})
        )
        return folder

    def process(
        self, folder: Path, until: float, alone: dict[str, str], seen: Callable[[], None]
    ) -> bool:
        """Run the process of `folder`, calling `seen` meanwhile; False if it had to be killed at
        `until` or failed.
        """
        variables = {name: str(self.caches / name.lower()) for name in CACHE_VARIABLES}
        with (self.options.out / "log.txt").open("ab") as log:
            process = _start(folder, log, {**os.environ, **variables, **alone})
            while process.poll() is None and time.monotonic() < until:
                seen()
                time.sleep(POLL_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            good = process.wait() == 0
        seen()
        return good

    def cold(self) -> None:
        """Seconds of the first call of each variant of the cases of --cold, or what it died of."""
        for case in self.colds:
            found = self.cold_s.setdefault(case, {})
            for name in self.variants(case):
                folder = self.order("cold", work=(case, name))
                empty = {variable: str(folder / variable.lower()) for variable in CACHE_VARIABLES}
                log, result = self.options.out / "log.txt", Files(folder).result
                known = log.stat().st_size if log.exists() else 0
                self.process(folder, self.deadline, empty, lambda: None)
                if result.exists():
                    found[name] = json.loads(result.read_text())
                elif time.monotonic() > self.deadline:
                    found[name] = "no time was left"
                else:
                    found[name] = last_line(log, known)
                print(f"{self.suite} {case}, cold: {name} {found[name]}", flush=True)
            if case not in self.cases:
                self.add(case, {})

    def ahead(self) -> dict[str, dict]:
        """Compile ahead what can be; what ours says of its graphs, by case and variant."""
        names = [name for name in self.ways if name not in self.options.late]
        work = [
            (case, name) for case in self.cases for name in names if name in self.variants(case)
        ]
        if not self.options.jobs or not work:
            return {}
        # A few of ours come first: most cases then find their kernels ready.
        first = [(case, "coda") for case in self.cases[:: max(1, len(self.cases) // 3)]]
        first = [pair for pair in first if pair in work]
        work = [*first, *(pair for pair in work if pair not in first)]
        jobs = min(self.options.jobs, len(work))
        # Beside the caches: a graph that comes out of them says nothing of itself.
        notes = self.caches / self.suite
        notes.mkdir(parents=True, exist_ok=True)
        folder = self.order("ahead", work=work, jobs=jobs, said=str(notes))
        until = time.monotonic() + AHEAD * (self.deadline - time.monotonic())
        start = time.monotonic()
        whole = self.process(folder, until, ALONE, lambda: None)
        took = time.monotonic() - start
        print(f"compiled ahead in {took:.0f} s" + ("" if whole else ", not all"), flush=True)
        self.results["environment"]["ahead_s"] = took
        said: dict[str, dict] = {}
        for path in notes.glob("*.json"):
            case, name, decided = json.loads(path.read_text())
            said.setdefault(case, {})[name] = decided
        return said

    def measure(self, said: dict[str, dict]) -> None:
        """Measure all cases; a process that dies is started again without the variant that it
        prepared, or without the case.
        """
        skip: dict[str, dict[str, str]] = {}
        why = "no time was left"
        known = self.results[self.suite]

        def left() -> list[str]:
            return [case for case in self.cases if case not in known]

        while left() and time.monotonic() < self.deadline:
            folder = self.order(
                "measure",
                cases=[(case, self.variants(case)) for case in left()],
                seconds=self.options.seconds,
                energy_s=self.options.energy,
                deadline=self.deadline,
                skip=skip,
            )
            files, read = Files(folder), [0]

            def seen(files: Files = files, read: list[int] = read) -> None:
                if not files.result.exists():
                    return
                lines = files.result.read_text().split("\n")[:-1]
                for line in lines[read[0] :]:
                    case, result = json.loads(line)
                    result["decisions"] = said.get(case, {}) | result["decisions"]
                    self.add(case, result)
                read[0] = len(lines)

            if self.process(folder, self.deadline + GRACE_S, {}, seen):
                break
            case = (folder / "case").read_text() if (folder / "case").exists() else ""
            culprit = files.progress.read_text() if files.progress.exists() else ""
            if case in known or not case:
                if time.monotonic() < self.deadline:
                    why = "the process died outside a case; its log says why"
                break
            if culprit and culprit not in skip.get(case, {}):
                skip.setdefault(case, {})[culprit] = "the process died while preparing it"
            else:
                self.add(case, {"error": "the process died while measuring it"})
        for case in left():
            self.add(case, {"error": why})

    def add(self, case: str, result: dict) -> None:
        """Keep a result, and all of them on disk."""
        cold = {"cold_s": self.cold_s[case]} if case in self.cold_s else {}
        self.results[self.suite][case] = result | cold
        out = self.options.out
        (out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        (out / "tables.txt").write_text(report.short(self.results) + "\n")
        (out / "profiles.txt").write_text(report.profiles(self.results))
        if result:
            print(f"{self.suite} {case}: {_line(result)}", flush=True)


def _line(result: dict) -> str:
    if "error" in result:
        return result["error"]
    times = {name: found["median_ms"] for name, found in result["variants"].items()}
    known = [f"{name} {time:.3f}" for name, time in times.items()]
    if times.get("coda") and times.get("compile"):
        known.append(f"coda at {times['compile'] / times['coda']:.3f}")
    known += [f"{name}: {why}" for name, why in result["errors"].items()]
    return ", ".join(known) + f" ({result['seconds']:.1f} s)"


def _start(folder: Path, log: IO[bytes], variables: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.grid_job", str(folder)],
        cwd=REPOSITORY,
        env=variables,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def main(suite: str, arguments: list[str]) -> None:
    """Run `suite`, "grid", "families" or "fp8"; files and terminal as the module docstring says."""
    start = time.monotonic()
    parser = _parser(suite)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = Run(suite, options, arguments, start + options.deadline, Path(folder))
        except ValueError as error:
            parser.error(f"--cases: {error}")
        run.cold()
        run.measure(run.ahead())
    print("\n" + report.short(run.results))
