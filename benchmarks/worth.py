# SPDX-License-Identifier: Apache-2.0
"""What each pass, pattern and counter is worth: a stock model's step with it and without.

``python -m benchmarks worth measure OUT.json`` compiles each workload under torch.compile, with
everything, and without each feature that did something to it, and times each beside the whole,
sustained, A B A B: milliseconds, peak GiB of a step, host milliseconds (until the step's last
launch) and kernels. A pass that leaves a workload's graphs as they are is worth nothing there and
is not run again, nor is one that saved enough elsewhere. ``--cliffs`` asks instead how a step
without a feature compares with torch.compile: it takes all idioms away from every workload of
``CLIFFS``, and each feature from those where it saved most by the last results. Workloads compile
side by side, in processes that take turns on the GPU. OUT.json is written after every feature; what
it has is not measured again. ``python -m benchmarks worth render OUT.json [CLIFFS.json]`` writes
docs/internals/worth.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import fcntl
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from . import environment, models
from .measure import mark
from .worth_models import WORKLOADS, Workload
from .worth_page import gains, page

Step = Callable[[], Any]
#: Seconds of one sustained sample; there are two of each side.
SAMPLE = 0.5
#: The same of warming up, until the clock has settled.
SETTLE = 0.3
#: Turns of samples, after one that warms up. If the middle half of the ratios of two steps is wider
#: than ``CALM``, or a step takes longer than ``EXPLAINED`` times its kernels, it was disturbed, and
#: more samples are taken.
CALM, EXPLAINED = 1.01, 1.3
LEAST, MOST = 3, 9
#: Workloads of a run for cliffs; from how many each feature is taken away; what says which.
CLIFFS = ("LoRA", "1B training", "8B training", "1B prefill", "Qwen3 1.7B", "Gemma 3 1B", "GPT-2")
WORST = 2
LAST = environment.REPOSITORY / "benchmarks" / "results" / "h200_worth.json"
#: A feature that saves this part of a step, or of the peak, on one workload is not taken away from
#: another.
ENOUGH, ENOUGH_PEAK = 0.015, 0.06


def main(arguments: list[str]) -> None:
    """Measure, or render what was measured."""
    parser = argparse.ArgumentParser("python -m benchmarks worth", description=__doc__)
    parser.add_argument("what", choices=("measure", "part", "render"))
    parser.add_argument("file", type=Path)
    parser.add_argument("of_cliffs", type=Path, nargs="?", help="what measured the cliffs (render)")
    parser.add_argument("--cliffs", action="store_true", help="beside torch.compile; few workloads")
    parser.add_argument("--workloads")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    options = parser.parse_args(arguments)
    chosen = options.workloads
    names = chosen.split(",") if chosen else list(CLIFFS if options.cliffs else WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"--workloads: {', '.join(unknown)} is none of {', '.join(WORKLOADS)}")
    if options.what == "render":
        files = filter(None, (options.file, options.of_cliffs))
        text = page(*(json.loads(file.read_text()) for file in files))
        (environment.REPOSITORY / "docs" / "internals" / "worth.md").write_text(text)
    elif options.what == "part":
        part(names[0], options)
    elif failed := measure(options, names):
        sys.exit(f"{failed} workloads failed; their logs stand beside {options.file}")


def measure(options: argparse.Namespace, names: list[str]) -> int:
    """Run a process a workload, at most ``options.jobs`` at once; how many of them failed."""
    end = time.monotonic() + options.seconds
    each = max(1, (os.cpu_count() or 1) // min(options.jobs, len(names)))  # the host launches too
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(each))
    found: dict[str, Any] = {"workloads": {}}
    if options.file.exists():
        found = json.loads(options.file.read_text())
    found["environment"] = environment.describe(sys.argv[1:], options.commit, "benchmarks.worth")
    folder = options.file.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    gpus = visible.split(",") if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else ["0"]
    paths = {name: folder / f"{name}.json" for name in {**found["workloads"], **WORKLOADS}}
    for name, path in paths.items():
        _write(path, found["workloads"].get(name, {}))

    def one(name: str) -> int:
        left = end - time.monotonic()
        if left < 40:
            return 0
        command = [sys.executable, "-m", "benchmarks", "worth", "part", str(paths[name])]
        gpu = gpus[names.index(name) % len(gpus)]
        command += ["--lock", str(folder / f"gpu{gpu}.lock")]
        command += ["--workloads", name, "--seconds", str(left), *["--cliffs"] * options.cliffs]
        with paths[name].with_suffix(".log").open("w") as log:
            try:
                env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
                return subprocess.call(command, stdout=log, stderr=log, timeout=left + 20, env=env)
            except subprocess.TimeoutExpired:
                return 1

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        running = {threads.submit(one, name): name for name in names}
        for done in concurrent.futures.as_completed(running):
            failed += done.result()
            name = running[done]
            found["workloads"][name] = json.loads(paths[name].read_text())
            options.file.write_text(json.dumps(found, indent=1))
    return failed


def _write(path: Path, found: dict[str, Any]) -> None:
    """In one step, for others read it."""
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").replace(path)


def part(name: str, options: argparse.Namespace) -> None:
    """Measure one workload into a file, feature by feature, as long as there is time."""
    path, lock, end = options.file, options.lock, time.monotonic() + options.seconds
    torch._dynamo.config.recompile_limit = 512
    torch._dynamo.config.accumulated_recompile_limit = 4096
    found: dict[str, Any] = json.loads(path.read_text())
    with turn(lock):
        workload = WORKLOADS[name]()
    changed, fired = watched()
    whole = workload.step(())
    with compiled(whole, functools.partial(turn, lock)):
        features = sorted({*changed, *fired})
        found.update({"fired": dict(fired), "features": features, "whole": facts(whole)})
        found["whole"]["ms"] = found["whole"]["ms_whole"] = sustained(whole)
    found.setdefault("without", {})
    if "ms" not in found.get("compile", {}):
        found["compile"] = compared(plain(workload), whole, lock, {"whole": found["whole"]})
    _write(path, found)
    start = list(WORKLOADS).index(name) * len(features) // len(WORKLOADS)  # not all the same first
    order = cliffs_of(name, features) if options.cliffs else features[start:] + features[:start]
    for feature in order:
        if feature in found["without"] or time.monotonic() > end - 30:
            continue
        if not options.cliffs and feature in earned(path.parent):
            continue
        known = {"whole": found["whole"], **found["without"]}
        if feature == "attention" and workload.causal and options.cliffs:
            found["untold"] = compared(plain(workload, told=False), whole, lock, known)
        found["without"][feature] = compared(workload.step((feature,)), whole, lock, known)
        _write(path, found)


def plain(workload: Workload, told: bool = True) -> Step:
    """The step under torch.compile; if ``told``, SDPA is told to be causal where that is all a mask
    says."""
    own = copy.copy(workload)
    if own.causal and told:
        own.model = models.causal(own.model)
    return own.step((), "inductor")


def cliffs_of(name: str, features: Iterable[str]) -> list[str]:
    """Those of ``features`` to take from the workload ``name`` for cliffs: all idioms first; then
    those that saved most there, and those of which the last results know too little."""
    chosen = ["idioms"]
    for feature in set(features) - {"idioms"}:
        rows = gains(json.loads(LAST.read_text())).get(feature, ())
        known = [r["workload"] for r in rows if "step" in r and r["workload"] in CLIFFS]
        if len(known) < WORST or name in known[:WORST]:
            chosen.append(feature)
    return sorted(chosen, key=lambda feature: (feature != "idioms", feature))


def compared(step: Step, whole: Step, lock: Path, known: dict[str, Any]) -> dict[str, Any]:
    """``step`` beside the whole one. ``known``: steps whose times are known, "whole" among them;
    one that launches the same kernels is not timed again."""
    try:
        with compiled(step, functools.partial(turn, lock)):
            found = facts(step)
            same = (r for r in known.values() if r.get("launches") == found["launches"])
            if (twin := next(same, None)) is not None:
                return found | {key: twin[key] for key in ("ms", "ms_whole")}
            busy = known["whole"]["busy"], found["busy"]
            times = in_turns((whole, step), busy)
    except (RuntimeError, ImportError, TypeError) as error:
        return {"error": environment.scrub(f"{type(error).__name__}: {error}")[:300]}
    return found | dict(zip(("ms_whole", "ms"), times, strict=True))


def in_turns(steps: tuple[Step, Step], busy: tuple[float, float]) -> tuple[float, float]:
    """Median milliseconds of two steps, taken in turns until their ratio is calm; ``busy``: of
    their kernels. At the power limit the first samples after a pause are too fast, so that least
    times say nothing. Raises RuntimeError if the ratio is never calm."""
    samples: list[tuple[float, ...]] = []
    for turn in range(MOST + 1):
        samples.append(tuple(sustained(step) for step in steps))
        ratios = sorted(b / a for a, b in samples[1:])
        middle = ratios[len(ratios) // 4 : len(ratios) - len(ratios) // 4]
        if not ratios:
            continue
        medians = tuple(statistics.median(each) for each in zip(*samples[1:], strict=True))
        explained = all(ms <= EXPLAINED * of for ms, of in zip(medians, busy, strict=True))
        if turn >= LEAST and middle[-1] <= CALM * middle[0] and explained:
            return medians[0], medians[1]
    raise RuntimeError(f"disturbed: kernels' ms are {busy}, samples {samples}")


def earned(folder: Path) -> set[str]:
    """Features that saved enough on a workload that is already measured."""
    names = set()
    for path in folder.glob("*.json"):
        part = json.loads(path.read_text())
        for name, without in part.get("without", {}).items():
            if "error" not in without and (
                without["ms"] > (1 + ENOUGH) * without["ms_whole"]
                or without["peak"] > (1 + ENOUGH_PEAK) * part["whole"]["peak"]
            ):
                names.add(name)
    return names


def watched() -> tuple[set[str], Counter[str]]:
    """Names of the passes that will have changed a graph, and what will have fired."""
    from coda_inductor import pipeline, record

    changed: set[str] = set()
    fired: Counter[str] = Counter()
    run, fire = pipeline._observe, record.Record.fire

    def observed(each: Any, graph: Any, record: Any) -> None:
        before = str(graph)
        run(each, graph, record)
        if not each.needed and str(graph) != before:
            changed.add(each.name)

    def count(self: Any, name: str, times: int = 1) -> None:
        fired[name] += times
        fire(self, name, times)

    pipeline._observe, record.Record.fire = observed, count
    return changed, fired


@contextmanager
def compiled(
    step: Step, turn: Callable[[], AbstractContextManager[None]], eager: bool = False
) -> Iterator[None]:
    """Take the first step, and what is in the body, in a turn that begins when its first graph is
    compiled: most of that is the host's work, and nobody is kept from the GPU meanwhile."""
    with ExitStack() as stack:
        entered: list[None] = []

        def begin(*_: Any) -> None:
            if not entered and (eager or counters["stats"]["unique_graphs"]):
                entered.append(stack.enter_context(turn()))

        handler = torch._dynamo.callback.callback_handler
        handler.register_end_callback(begin)
        if eager:
            begin()
        try:
            step()
            torch.cuda.synchronize()
            yield
        finally:
            handler.remove_end_callback(begin)


def facts(step: Step) -> dict[str, Any]:
    """Peak GiB, host ms, kernels and their ms of one step; ``launches`` tells two sets apart."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    host = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total]
    names = sorted((event.key, event.count) for event in events)
    launches = hashlib.sha256(repr(names).encode()).hexdigest()[:12]
    kernels = sum(event.count for event in events)
    busy = sum(event.self_device_time_total for event in events) / 1e3
    found = {"peak": peak, "host": min(host), "kernels": kernels, "launches": launches}
    return found | {"busy": busy}


def sustained(step: Step, settle: float = SETTLE, sample: float = SAMPLE, least: int = 7) -> float:
    """Median milliseconds of ``least`` steps or more, for ``sample`` seconds after ``settle``. A
    process that compiles beside runs a step now and then, which a median does not see."""
    times: list[float] = []
    for seconds in (settle, sample):
        torch.cuda.synchronize()
        start, marks = time.perf_counter(), [mark()]
        while len(marks) <= least or time.perf_counter() - start < seconds:
            step()
            marks.append(mark())
            if len(marks) % 4 == 0:
                marks[-2].synchronize()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return statistics.median(times)


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """One process at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
