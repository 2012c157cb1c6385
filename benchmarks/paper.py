# SPDX-License-Identifier: Apache-2.0
"""The kernels of CODA's paper, sustained, A B B A: forward and backward apart, without gradients of
weights, and the head with its loss at a large vocabulary with them.

``python -m benchmarks paper OUT.json`` starts a process a case, lets all of them compile at once,
and then asks one after the other for samples. ``--coda-kernels FOLDER`` adds the paper's own
kernels: a folder with its package ``coda``, and the QuACK and other packages that it needs, which
come first on the path of processes of their own. ``--tune`` has QuACK and these try all their
configurations. ``python -m benchmarks paper OUT.json --render`` writes docs/results/paper.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import environment, headline, measure, paper_cuts, paper_page, worth
from .paper_cuts import Cut, Torch

ROWS, VOCABULARY = 8192, 32768
#: Name -> arguments of ``Cut``.
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{cut} {d}": (cut, d, ROWS, VOCABULARY) for cut in paper_cuts.CUTS
       for d in (2048, 4096, 8192)},
    "head 4096x128256": ("head", 4096, 4096, 128256, True),
}  # fmt: skip
MODES = ("forward", "backward", "step")
#: Samples of a variant and mode, and seconds before and in one.
TURNS, SETTLE = 2, 0.05


def main(arguments: list[str]) -> None:
    """Measure or render; or, as one of the processes, be measured."""
    parser = argparse.ArgumentParser("python -m benchmarks paper", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="*", help="cases, comma-separated shell patterns")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a sample")
    parser.add_argument("--tune", action="store_true", help="QuACK tries its configurations")
    parser.add_argument("--coda-kernels", default=os.environ.get("CODA_KERNELS", ""))
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--part", choices=("all", "paper"), help=argparse.SUPPRESS)
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
    found = {"environment": environment.describe(sys.argv[1:], options.commit, "benchmarks.paper")}
    results: dict[str, Any] = {}
    began = time.monotonic()
    log = options.file.with_suffix(".log")
    more = ["--seconds", str(options.seconds), *["--tune"] * options.tune, "--part"]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each of many processes
    running = {}
    for name in names:
        command = ["paper", str(options.file), "--only", name, *more]
        running[name] = [headline.start([*command, "all"], log)]
        if options.coda_kernels:
            running[name].append(headline.start([*command, "paper"], log, options.coda_kernels))
    for ready in (process for each in running.values() for process in each):
        headline.ask(ready, "compiled")
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for name, processes in running.items():
        result = results[name] = {"errors": {}, "variants": {}}
        able = []
        for process in processes:
            said = headline.ask(process, "facts")
            if said is None:
                result["errors"]["process"] = f"ended; its log is {log.name}"
                continue
            result["errors"] |= said["errors"]
            result["variants"] |= said["variants"]
            able += [(process, v, mode) for v, each in said["variants"].items() for mode in MODES
                     if mode in each]  # fmt: skip
        for turn in range(TURNS):
            for process, variant, mode in able if turn % 2 == 0 else reversed(able):
                facts = result["variants"][variant][mode]
                facts.setdefault("samples", []).append(headline.ask(process, [variant, mode]))
        for facts in (result["variants"][variant][mode] for _, variant, mode in able):
            facts["median_ms"] = statistics.median(facts["samples"])
        for process in processes:
            process.kill()
        options.file.write_text(json.dumps(found | {"results": results}, indent=1))
        times = {v: {m: round(f["median_ms"], 3) for m, f in each.items()}
                 for v, each in result["variants"].items()}  # fmt: skip
        print(name, times, result["errors"], flush=True)


def answer(name: str, options: argparse.Namespace) -> None:
    """Compile all variants of a case, then answer each line of stdin with a line of JSON."""
    out, sys.stdout = sys.stdout, sys.stderr
    os.environ.setdefault("CODA_TUNE", "never")
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # a graph is used again and again
    case = Case(CASES[name], options)
    for line in sys.stdin:
        question = json.loads(line)
        said: Any = {"errors": case.errors}
        if question == "facts":
            said["variants"] = case.facts()
        elif question != "compiled":
            step = case.call(*question)
            said = worth.sustained(step, SETTLE, options.seconds)
            del step
        torch.cuda.empty_cache()
        print(json.dumps(said), file=out, flush=True)


class Case:
    """A cut, its inputs, and the variants that work, each compiled.

    Attributes:
        errors: variant, or variant and mode -> why there is none.
    """

    def __init__(self, arguments: tuple[Any, ...], options: argparse.Namespace):
        self.cut = Cut(*arguments)
        self.errors: dict[str, str] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.modes: dict[str, list[str]] = {}
        self.leaves = [each.requires_grad_() for each in self.cut.inputs]
        self.wanted = [*self.leaves, *(w for w in self.cut.parameters() if w.requires_grad)]
        with torch.no_grad():
            outputs = self.cut.function(Torch(), self.cut, *self.leaves)
        self.given = self.plain = [
            torch.randn_like(y) if y.ndim else torch.ones_like(y) for y in outputs
        ]
        self.paper = options.part == "paper"
        self.kit = Torch()
        del outputs
        for variant, make in self.variants(options.tune).items():
            try:
                self.functions[variant] = make()
                self.given = [*self.kit.pack(self.cut, tuple(self.plain))]
                for mode in MODES:
                    call, self.modes[variant] = None, self.modes.get(variant, [])
                    call = self.call(variant, mode)
                    call()
                    measure.synchronize()
                    self.modes[variant].append(mode)
            except Exception as error:  # noqa: BLE001  what it raises is its result
                done = self.modes.get(variant)
                self.errors[f"{variant}, backward" if done else variant] = measure._reason(error)
            call = None
            torch.cuda.empty_cache()

    def variants(self, tune: bool) -> dict[str, Callable[[], Callable[..., Any]]]:
        """Name -> what makes a function of the inputs."""
        cut = self.cut

        def kit(make: Callable[[], Torch]) -> Callable[..., Any]:
            self.kit = make()
            return functools.partial(cut.function, self.kit, cut)

        if self.paper:
            return {"paper": lambda: kit(lambda: paper_cuts.Paper(tune))}

        def compiled(**more: Any) -> Callable[..., Any]:
            body, torch_kit = cut.function, Torch()
            return torch.compile(lambda *x: body(torch_kit, cut, *x), dynamic=False, **more)

        measure.register("coda")
        found = {
            "eager": lambda: kit(Torch),
            "compile": compiled,
            "max_autotune": lambda: compiled(mode="max-autotune-no-cudagraphs"),
            "coda": lambda: compiled(backend="coda"),
            "liger": lambda: kit(paper_cuts.Liger),
            "quack": lambda: kit(lambda: paper_cuts.Quack(tune)),
        }
        if cut.name == "head":
            found["linear_cross_entropy"] = lambda: kit(paper_cuts.Fused)
        elif cut.name != "rotary":
            found["flashinfer"] = lambda: kit(paper_cuts.FlashInfer)
        return found

    def call(self, variant: str, mode: str) -> Callable[[], Any]:
        """One call of it. A backward has a graph of its own, kept for the next call."""
        function, given = self.functions[variant], self.given

        def forward() -> Any:
            with torch.no_grad():
                return function(*self.leaves)

        if mode == "forward":
            return forward
        if mode == "step":
            return lambda: torch.autograd.grad(function(*self.leaves), self.wanted, given)
        outputs = function(*self.leaves)
        return lambda: torch.autograd.grad(outputs, self.wanted, given, retain_graph=True)

    def facts(self) -> dict[str, Any]:
        """Variant -> mode -> the worst relative error of its results, and peak MiB of a call."""
        exact = self.cut.exact()
        leaves = [each.detach().float().requires_grad_() for each in self.leaves]
        weights = [w for w in exact.parameters() if w.requires_grad]
        outputs = exact.function(Torch(), exact, *leaves)
        given = [each.float() for each in self.plain]
        grads = torch.autograd.grad(outputs, [*leaves, *weights], given)
        truths = {"forward": tuple(y.detach() for y in outputs), "backward": grads, "step": grads}
        del exact, outputs, leaves, weights
        found: dict[str, Any] = {}
        for variant, modes in self.modes.items():
            found[variant] = {}
            for mode in modes:
                call = self.call(variant, mode)
                truth = truths[mode]
                if mode == "forward":
                    truth = self.kit.pack(self.cut, truth)
                pairs = zip(call(), truth, strict=True)
                error = max(_error(value, truth) for value, truth in pairs)
                found[variant][mode] = {"error": error, "peak_mib": measure.peak_mib(call)}
        return found


def _error(value: Tensor, truth: Tensor) -> float:
    return measure.relative_error(value.detach().reshape(truth.shape), truth)
