# SPDX-License-Identifier: Apache-2.0
"""Where the time of a first call goes: ``python -m benchmarks.compile_parts SUITE CASE BACKEND``.

One case of suite `grid` or `families`, compiled once in this process with whatever the compile
caches hold (the environment's folders): seconds to the first result, and of them those spent in
each part, the parts within it not counted twice. With ``--profile`` also Python's profile of the
main thread, which slows everything down.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import importlib
import json
import pstats
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate

from . import contest
from .cases import Case, Way
from .measure import register, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: (module, attribute, what it is). What a version of torch does not have is left out.
TORCH = (
    ("torch._dynamo.convert_frame", "_compile", "Dynamo"),
    ("torch._dynamo.output_graph", "OutputGraph.call_user_compiler", "the backend, other"),
    ("torch._inductor.compile_fx", "compile_fx", "Inductor, other"),
    ("torch._functorch.aot_autograd", "create_aot_state", "AOTAutograd, tracing"),
    (
        "torch._functorch._aot_autograd.autograd_cache",
        "autograd_cache_key",
        "Inductor, cache keys",
    ),
    ("torch._inductor.codecache", "compiled_fx_graph_hash", "Inductor, cache keys"),
    ("torch._inductor.compile_fx", "_recursive_joint_graph_passes", "Inductor, joint passes"),
    ("torch._inductor.compile_fx", "_recursive_post_grad_passes", "Inductor, post-grad passes"),
    (
        "torch._inductor.compile_fx",
        "min_cut_rematerialization_partition",
        "Inductor, partitioner",
    ),
    ("torch._inductor.graph", "GraphLowering.run", "Inductor, lowering"),
    ("torch._inductor.graph", "GraphLowering.compile_to_module", "Inductor, code"),
    ("torch._inductor.async_compile", "AsyncCompile.wait", "Inductor, waiting for Triton"),
    (
        "torch._inductor.runtime.triton_heuristics",
        "CachingAutotuner.autotune_to_one_config",
        "Triton, choosing among configs",
    ),
    (
        "torch._inductor.runtime.triton_heuristics",
        "CachingAutotuner.precompile",
        "Triton, compiling or loading here",
    ),
)
QUACK = "ours, importing QuACK for a launch"
OURS = (
    ("coda_inductor.backend", "compile_fx", "Inductor, other"),
    ("coda_inductor.backend", "on_dynamo", "ours, on Dynamo's graph"),
    ("coda_inductor.joint", "on_aten", "ours, on the aten graph, other"),
    ("coda_inductor.joint", "JointPass.uuid", "ours, cache key"),
    ("coda_inductor.runtime.notice", "before_compile", "ours, notice"),
    ("coda_inductor.runtime.pool", "wait", "ours, waiting for kernels"),
    ("coda_inductor.runtime.pool", "warm_up", "ours, starting the server"),
    ("coda_inductor.runtime.launch", "Kernel._build", "ours, loading kernels"),
    ("coda_inductor.runtime.launch", "_quack_launcher", QUACK),
)


class Stopwatch:
    """Seconds spent in named parts, by thread; a part within another is the inner one's.

    Attributes:
        seconds: part -> its own.
        whole: part -> with what it contains; a part within itself counts once.
        calls: part -> how often it was entered.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.whole: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._local = threading.local()
        self._lock = threading.Lock()

    def timed(self, part: str, function: Callable) -> Callable:
        """`function`, whose time is `part`'s."""

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            stack.append([part, 0.0])
            start = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                took = time.perf_counter() - start
                _, inner = stack.pop()
                if stack:
                    stack[-1][1] += took
                with self._lock:
                    self._add(self.seconds, part, took - inner)
                    if all(part != outer for outer, _ in stack):
                        self._add(self.whole, part, took)
                    self.calls[part] = self.calls.get(part, 0) + 1

        return call

    @staticmethod
    def _add(where: dict[str, float], part: str, seconds: float) -> None:
        where[part] = where.get(part, 0.0) + seconds

    def install(self, module: str, attribute: str, part: str) -> None:
        """Time that function or method, if there is one, where `module` looks it up."""
        owner: Any = importlib.import_module(module)
        *outer, name = attribute.split(".")
        for each in outer:
            owner = getattr(owner, each, None)
        if (function := getattr(owner, name, None)) is not None:
            setattr(owner, name, self.timed(part, function))


class Kernels:
    """When kernels were asked for and ready, in seconds after `start`; needs no change of ours.

    Attributes:
        ready: when each compile server answered for the first time: its imports are done.
        jobs: (asked for, ready) of each kernel.
    """

    def __init__(self, start: float):
        from coda_inductor.runtime import client

        self.start = start
        self.ready: list[float] = []
        self.jobs: list[tuple[float, float]] = []
        begin, submit = client.Server.__init__, client.Server.submit

        def begun(server: Any, arch: str) -> None:
            begin(server, arch)
            nothing = {"program": "", "config": ""}  # an error at once, from a worker
            job = {"request": nothing, "marker": "", "folder": None}
            submit(server, job).add_done_callback(lambda _: self.ready.append(self._now()))

        def submitted(server: Any, job: dict) -> Any:
            asked = self._now()
            future = submit(server, job)
            future.add_done_callback(lambda _: self.jobs.append((asked, self._now())))
            return future

        client.Server.__init__, client.Server.submit = begun, submitted  # type: ignore[method-assign]

    def _now(self) -> float:
        return time.perf_counter() - self.start


def first_call(suite: str, case: Case, backend: str, profile: Path | None = None) -> dict:
    """Compile `case` once.

    Args:
        suite: of `case`, a key of :data:`benchmarks.contest.SUITES`.
        case: what is compiled.
        backend: of torch.compile.
        profile: a file for Python's profile of the main thread.

    Returns:
        ``{"first_call_s", "second_call_s", "parts": {part: [own seconds, with what it contains,
        calls]}, "elsewhere_s", "ready_s" and "kernels" as :class:`Kernels` has them, "torch":
        {phase: seconds} as torch itself counts them, "decisions"}``.
    """
    with torch.set_grad_enabled(case.training):
        work = contest.SUITES[suite].work(case)
        with torch.compiler.set_stance("force_eager"):
            work.compiled(Way())()  # libraries start: that is no backend's
        synchronize()
        watch, python = Stopwatch(), cProfile.Profile()
        start = time.perf_counter()
        if profile:
            python.enable()
        watch.timed("importing Inductor", _import_inductor)()
        for each in TORCH:
            watch.install(*each)
        kernels = None
        if backend == "coda":
            watch.timed("importing ours", _import_ours)()
            kernels = Kernels(start)
            _time_ours(watch)
        call = work.compiled(Way(backend))
        call()
        synchronize()
        took = time.perf_counter() - start
        python.disable()
        again = time.perf_counter()
        call()
        synchronize()
        again = time.perf_counter() - again
    if profile:
        with profile.open("w") as stream:
            stats = pstats.Stats(python, stream=stream)
            stats.sort_stats("cumulative").print_stats(120)
            stats.sort_stats("tottime").print_stats(40)
    return {
        "first_call_s": took,
        "second_call_s": again,
        "parts": {
            part: [seconds, watch.whole[part], watch.calls[part]]
            for part, seconds in sorted(watch.seconds.items(), key=lambda pair: -pair[1])
        },
        "elsewhere_s": took - sum(watch.seconds.values()),
        "ready_s": kernels.ready if kernels else [],
        "kernels": sorted(kernels.jobs) if kernels else [],
        "torch": dict(_torchs_own()),
        "decisions": contest.decisions() if backend == "coda" else None,
    }


def _import_inductor() -> None:
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_heuristics  # noqa: F401


def _import_ours() -> None:
    register("coda")
    import coda_inductor.backend  # noqa: F401


def _import_quack() -> None:
    import coda_inductor.mainloop.build  # noqa: F401


def _time_ours(watch: Stopwatch) -> None:
    from coda_inductor import pipeline
    from coda_inductor.runtime.launch import Kernel

    for each in OURS:
        watch.install(*each)
    build, imported = Kernel._build, watch.timed(QUACK, _import_quack)

    def built(*arguments: Any) -> None:
        imported()
        build(*arguments)

    Kernel._build = built  # type: ignore[method-assign]
    for name in ("ON_DYNAMO", "ON_ATEN"):
        timed = (
            dataclasses.replace(each, run=watch.timed(f"ours, pass {each.name}", each.run))
            for each in getattr(pipeline, name)
        )
        setattr(pipeline, name, tuple(timed))


def _torchs_own() -> Iterator[tuple[str, float]]:
    """Seconds by phase, each with what it contains."""
    from torch._dynamo.utils import compilation_time_metrics

    for phase, times in compilation_time_metrics.items():
        if (seconds := sum(times)) >= 0.05:
            yield phase, round(seconds, 3)


def table(result: dict) -> str:
    """`result` of :func:`first_call` as text."""
    rows = [
        [f"{own:.2f}", f"{whole:.2f}", calls, part]
        for part, (own, whole, calls) in result["parts"].items()
        if whole >= 0.02
    ]
    rows.append([f"{result['elsewhere_s']:.2f}", "", "", "elsewhere"])
    lines = [
        f"first call {result['first_call_s']:.2f} s, second {result['second_call_s']:.3f} s",
        tabulate(rows, headers=["s", "whole", "calls", ""], tablefmt="plain"),
    ]
    if result["ready_s"]:
        lines.append(
            "compile server ready at " + ", ".join(f"{at:.2f}" for at in result["ready_s"])
        )
    if jobs := result["kernels"]:
        each = ", ".join(f"{asked:.1f}-{ready:.1f}" for asked, ready in jobs)
        lines.append(f"{len(jobs)} kernels, asked for and ready at: {each}")
    lines.append("torch's own, with what each contains: " + json.dumps(result["torch"]))
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.compile_parts")
    parser.add_argument("suite", choices=tuple(contest.SUITES))
    parser.add_argument("case", type=Case.parse, help="such as 8B-4096-training-bf16")
    parser.add_argument("backend")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--profile", type=Path, help="text file for the main thread's profile")
    options = parser.parse_args()
    result = first_call(options.suite, options.case, options.backend, options.profile)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
