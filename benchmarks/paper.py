# SPDX-License-Identifier: Apache-2.0
"""The kernels of CODA's paper, sustained, A B B A: forward and backward apart, without gradients of
weights, and the head with its loss at a large vocabulary with them.

``python -m benchmarks paper OUT.json`` starts a process a case, lets all of them compile at once,
and then asks one after the other for samples. ``python -m benchmarks paper OUT.json --render``
writes docs/results/paper.md.
"""

import argparse
import copy
import fnmatch
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import environment, headline, measure, paper_cuts, paper_page, worth
from .paper_cuts import Cut, Torch

#: Name -> arguments of ``Cut``.
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{cut} {d}": (cut, d, 8192, 32768) for cut in paper_cuts.CUTS for d in (2048, 4096, 8192)},
    "head 4096x128256": ("head", 4096, 4096, 128256, True),
}
#: What most cuts are timed in, and what a layer and a head.
MODES, MORE = ("forward", "backward"), ("forward", "backward", "step")
#: Samples of a variant and mode.
TURNS = 4
#: Cases that compile at a time: more of them want more memory than there is.
TOGETHER = 6
Call = Callable[..., Any]


def main(arguments: list[str]) -> None:
    """Measure or render; or, as one of the processes, be measured."""
    parser = measure.parser("paper", __doc__)
    parser.add_argument("--only", default="*", help="cases, comma-separated shell patterns")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a sample, and before it")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    patterns = options.only.split(",")
    names = [name for name in CASES if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    if not names:
        parser.error(f"--only {options.only}: no such case; there are {', '.join(CASES)}")
    if options.render:
        paper_page.write(json.loads(options.file.read_text()), options.file.name)
    elif options.part:
        answer(names[0], options)
    else:
        measured(names, options)


def measured(names: list[str], options: argparse.Namespace) -> None:
    """Fill the file, case by case."""
    found = environment.describe(sys.argv[1:], options.commit, "benchmarks.paper")
    results: dict[str, Any] = {}
    log = options.file.with_suffix(".log")
    # There are many processes, each with compile workers of its own.
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="4", CODA_COMPILE_WORKERS="2")
    command = ["paper", str(log), "--seconds", str(options.seconds), "--part", "--only"]
    for name, process in _running(names, command, log):
        ended = {"errors": {"process": f"ended; its log is {log.name}"}, "variants": {}}
        result = results[name] = headline.ask(process, "facts") or ended
        able = [(v, mode) for v, each in result["variants"].items() for mode in each]
        for variant, mode in measure.in_turns(able, TURNS):
            if (sample := headline.ask(process, [variant, mode])) is not None:
                result["variants"][variant][mode].setdefault("samples", []).append(sample)
        for variant, mode in able:
            facts = result["variants"][variant][mode]
            facts["median_ms"] = statistics.median(facts.get("samples", [math.nan]))
        process.kill()
        options.file.write_text(json.dumps({"environment": found, "results": results}, indent=1))
        times = {v: [round(f["median_ms"], 3) for f in each.values()]
                 for v, each in result["variants"].items()}  # fmt: skip
        print(name, times, result["errors"], flush=True)


def _running(
    names: list[str], command: list[str], log: Path
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A case and its process, which has compiled, ``TOGETHER`` cases at a time."""
    for first in range(0, len(names), TOGETHER):
        began = time.monotonic()
        now = names[first : first + TOGETHER]
        running = {name: headline.start([*command, name], log) for name in now}
        for process in running.values():
            headline.ask(process, "compiled")
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
        yield from running.items()


def answer(name: str, options: argparse.Namespace) -> None:
    """Compile all variants of a case, then answer each line of stdin with a line of JSON."""
    out, sys.stdout = sys.stdout, sys.stderr
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # a graph is used again and again
    cut = patient(lambda: Cut(*CASES[name]))
    case = Case(cut)
    for line in sys.stdin:
        question = json.loads(line)
        said: Any = None
        if question == "facts":
            said = case.facts()
        elif question != "compiled":
            call = functools.partial(case.call, *question)
            said = patient(lambda: worth.sustained(call(), options.seconds, options.seconds))  # noqa: B023
        torch.cuda.empty_cache()
        print(json.dumps(said), file=out, flush=True)


def patient(work: Callable[[], Any]) -> Any:
    """``work()``, again as long as other processes have the memory that it takes."""
    for _ in range(40):
        try:
            return work()
        except RuntimeError as error:
            if not re.search("out of memory|ALLOC_FAILED", str(error)):
                raise
        torch.cuda.empty_cache()
        time.sleep(3)
    return work()


class Case:
    """A cut, and its variants, each compiled.

    Attributes:
        functions: variant -> a function of the cut's inputs.
        modes: variant -> the modes that work.
        variants: has the errors of what does not.
    """

    def __init__(self, cut: Cut):
        self.cut = cut
        self.leaves = [each.requires_grad_() for each in cut.inputs]
        self.wanted = [*self.leaves, *(w for w in cut.parameters() if w.requires_grad)]
        outputs = patient(torch.no_grad()(lambda: cut.function(Torch(), cut, *self.leaves)))
        self.plain = tuple(torch.randn_like(y) if y.ndim else torch.ones_like(y) for y in outputs)
        self.functions: dict[str, Call] = {}
        self.modes: dict[str, list[str]] = {}
        self.variants = measure.Variants()
        for variant, make in self.makers().items():
            if (function := self.variants.attempt(variant, make)) is None:
                continue
            self.functions[variant], self.modes[variant] = function, []
            patient(self.refresh)
            for mode in MORE if cut.name in ("layer", "head") else MODES:
                run = functools.partial(patient, functools.partial(self._twice, variant, mode))
                if self.variants.attempt(f"{variant}, {mode}", run):
                    self.modes[variant].append(mode)
                elif mode == "forward":
                    break

    def makers(self) -> dict[str, Callable[[], Call]]:
        """Variant -> what makes its function."""
        cut = self.cut

        def kit(make: Callable[[], Torch]) -> Call:
            return functools.partial(cut.function, make(), cut)

        def compiled(**more: Any) -> Call:
            body, torch_kit = cut.function, Torch()
            return torch.compile(lambda *x: body(torch_kit, cut, *x), dynamic=False, **more)

        return {
            "eager": lambda: kit(Torch),
            "compile": compiled,
            "coda": lambda: compiled(backend="coda"),
            "liger": lambda: kit(paper_cuts.Liger),
            "quack": lambda: kit(paper_cuts.Quack),
        }

    def refresh(self) -> None:
        """Gradients of the outputs that no variant has written over, as Liger's rotation does."""
        self.given = tuple(each.clone() for each in self.plain)

    def _twice(self, variant: str, mode: str) -> bool:
        """As a sample does. Some have one backward a graph."""
        call = self.call(variant, mode)
        call()
        call()
        del call
        if measure.device() == "cuda":
            torch.cuda.empty_cache()
        return True

    def call(self, variant: str, mode: str) -> Callable[[], Any]:
        """A call of it. That of a backward has a graph of its own, which it keeps."""
        function, given = self.functions[variant], self.given
        if mode == "forward":
            return torch.no_grad()(functools.partial(function, *self.leaves))
        if mode == "step":
            return lambda: torch.autograd.grad(function(*self.leaves), self.wanted, given)
        outputs = function(*self.leaves)
        return lambda: torch.autograd.grad(outputs, self.wanted, given, retain_graph=True)

    def facts(self) -> dict[str, Any]:
        """Errors; variant -> mode -> the worst relative error of its results, and
        peak MiB of a call."""
        truths = patient(self._truths)
        found: dict[str, dict[str, Any]] = {}
        for variant, modes in self.modes.items():
            for mode in modes:
                of = functools.partial(self._facts, variant, mode, truths[mode])
                run = functools.partial(patient, of)
                if facts := self.variants.attempt(f"{variant}, {mode}", run):
                    found.setdefault(variant, {})[mode] = facts
        return {"variants": found, "errors": self.variants.errors}

    def _facts(self, variant: str, mode: str, truths: Sequence[torch.Tensor]) -> dict[str, Any]:
        patient(self.refresh)
        call = self.call(variant, mode)
        errors = (
            measure.relative_error(value.detach().reshape(truth.shape), truth)
            for value, truth in zip(call(), truths, strict=True)
        )
        return {"error": max(errors), "peak_mib": measure.peak_mib(call)}

    def _truths(self) -> dict[str, Sequence[torch.Tensor]]:
        """Mode -> its results in float32."""
        exact = copy.deepcopy(self.cut).float()
        leaves = [each.detach().float().requires_grad_() for each in self.leaves]
        wanted = [*leaves, *(w for w in exact.parameters() if w.requires_grad)]
        outputs = exact.function(Torch(), exact, *leaves)
        grads = torch.autograd.grad(outputs, wanted, [each.float() for each in self.plain])
        forward = tuple(y.detach() for y in outputs)
        return {"forward": forward, "backward": grads, "step": grads}
