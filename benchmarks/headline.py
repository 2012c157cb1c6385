# SPDX-License-Identifier: Apache-2.0
"""The headline: stock models under torch.compile and under coda, sustained, A B B A.

``python -m benchmarks headline OUT.json`` starts a process for each case and variant, a few cases
at a time, and asks them in turn for a sample (``worth.sustained``): the median of steps that run
back to back, as training does. Beside it the peak MiB of a step, weights and batch not included,
and the first step's seconds. ``--tree NAME=FOLDER`` adds coda of another tree. With ``--python
NAME=FILE``, another interpreter with another torch runs all variants too, as "NAME: coda".
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import environment, experts, models, worth, worth_models

#: Samples of one variant, and how many cases are in memory at a time.
SAMPLES, TOGETHER = 4, 2
#: More of ``models.MODELS``, with as many layers as there.
FAMILIES = ("qwen3", "gemma2", "gemma3", "phi3", "mistral", "granite", "olmo2", "starcoder2",
            "gptneox", "modernbert", "gpt2", "bert", "t5", "vit")  # fmt: skip
CASES: dict[str, Callable[[], worth_models.Workload]] = {
    "Llama 1B training": functools.partial(worth_models.stock, "1B", layers=16),
    "Llama 8B, 4 layers, training": worth_models.WORKLOADS["8B training"],
    "Llama 1B prefill": functools.partial(worth_models.stock, "1B", 16, training=False),
    "Llama 8B, 4 layers, prefill": worth_models.WORKLOADS["8B prefill"],
    "Llama 8B, 4 layers, FP8 prefill": functools.partial(worth_models.served, "8B", 4),
    **{name: worth_models.WORKLOADS[name] for name in (*models.MASKED, "FP8 rowwise", "LoRA 8B")},
    **{f"{name}, {layers} layers, training": functools.partial(worth_models.stock, name, layers)
       for name, layers in (("olmoe", 8), ("qwen3_moe", 8), ("mixtral", 2))},
    **experts.CASES,
    **{f"{name} training": functools.partial(worth_models.stock, name, worth_models.ALL)
       for name in FAMILIES},
}  # fmt: skip
#: ``compile_causal``: SDPA without a mask, told to be causal where the model is (not ViT), as some
#: releases of transformers do by themselves.
#: ``compile_flex``: transformers' FlexAttention, where a mask comes from data.
VARIANTS = ("compile", "compile_causal", "compile_flex", "coda")
NO_CAUSAL = (*models.MASKED, "FP8 rowwise", *experts.CASES,
             *(f"{name} training" for name in FAMILIES if name not in models.CAUSAL))  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure; or, as one of the processes, be measured."""
    parser = parser_of("headline", __doc__, "case", choices=CASES)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args(arguments)
    names = options.names or list(CASES)
    if options.part:
        answer(names[0], options.part)
        return
    found: dict[str, Any] = {
        "environment": environment.describe(sys.argv[1:], options.commit, "benchmarks.headline"),
        "results": {},
    }
    trees = dict(tree.split("=", 1) for tree in options.tree)
    at_once = 1 if options.python else TOGETHER
    while names:
        now, names = names[:at_once], names[at_once:]
        found["results"] |= together(now, trees, pythons(options), options.file)
        options.file.write_text(json.dumps(found, indent=1))


def parser_of(command: str, about: str | None, what: str, **more: Any) -> argparse.ArgumentParser:
    """The arguments of a benchmark whose processes take turns; ``names`` are those of ``what``."""
    parser = argparse.ArgumentParser(f"python -m benchmarks {command}", description=about)
    parser.add_argument("file", type=Path)
    parser.add_argument(f"--{what}", dest="names", action="append", help="repeatable", **more)
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


def pythons(options: argparse.Namespace) -> dict[str, str]:
    """Name -> interpreter; "" is this one."""
    return {"": sys.executable} | dict(each.split("=", 1) for each in options.python)


def measured(
    command: str, names: Iterable[str], options: argparse.Namespace, samples: int = SAMPLES
) -> dict[str, Any]:
    """The environment, and the results of a process for each name, which take turns; added to those
    in the file after each answer."""
    out, log = options.file, options.file.with_suffix(".log")
    about = environment.describe(sys.argv[1:], options.commit, f"benchmarks.{command}")
    keep = functools.partial(environment.keep, out, about)
    by_name = pythons(options)
    parts = {name: name.rpartition(": ") for name in names}
    running = {
        name: start([command, str(out), "--part", part], log, python=by_name[python])
        for name, (python, _, part) in parts.items()
    }
    ended = running.keys() - in_turn(running, samples, keep)
    for process in running.values():
        process.kill()
    return keep({name: {"error": f"it ended: see {log.name}", "samples": []} for name in ended})


def together(
    names: list[str], trees: dict[str, str], by_name: dict[str, str], out: Path
) -> dict[str, Any]:
    """Case -> variant -> figures, of processes that are all alive and take turns."""
    running = {
        (case, f"{name}: {variant}" if name else variant): start(
            ["headline", str(out), "--case", case,
             "--part", "coda" if variant in trees else variant],
            out.with_suffix(f".{variant}.log"), tree=trees.get(variant, ""), python=python,
        )
        for case in names
        for name, python in by_name.items()
        for variant in (*VARIANTS, *trees)
        if (case not in NO_CAUSAL or variant != "compile_causal")
        and (case in models.MASKED or variant != "compile_flex")
    }  # fmt: skip
    found: dict[str, Any] = {}
    for case in names:
        found[case] = in_turn({v: process for (c, v), process in running.items() if c == case})
        for facts in found[case].values():
            facts["median_ms"] = statistics.median(facts["samples"])
        print(case, {v: round(f["median_ms"], 2) for v, f in found[case].items()}, flush=True)
    for process in running.values():
        process.kill()
    return found


def in_turn(
    running: dict[str, subprocess.Popen[str]],
    samples: int = SAMPLES,
    keep: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> dict[str, Any]:
    """Name -> facts and samples, A B B A, of the processes that give some; ``keep`` gets it after
    each answer."""
    found: dict[str, Any] = {}
    for name, process in running.items():
        if (facts := ask(process)) is not None:
            found[name] = facts | {"samples": []}
            keep(found)
    for turn in range(samples):
        for name in found if turn % 2 == 0 else reversed(found):
            if (sample := ask(running[name])) is not None:
                print(name, sample, flush=True)
                found[name]["samples"].append(sample)
                keep(found)
    return found


def start(
    arguments: list[str], log: Path, tree: str = "", python: str = sys.executable
) -> subprocess.Popen[str]:
    """A process of ``python -m benchmarks`` that answers lines, of the code in ``tree``."""
    here = str(environment.REPOSITORY)
    path = os.pathsep.join(filter(None, (tree, here, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [python, "-m", "benchmarks", *arguments], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=log.open("a"), env=os.environ | {"PYTHONPATH": path},
        cwd=tree or here,
    )  # fmt: skip


def ask(process: subprocess.Popen[str], question: Any = None) -> Any:
    """Its next answer: facts first, then samples. None of a process that ended: see its log."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line else None


def answer(case: str, variant: str) -> None:
    """Compile, then answer each line of stdin with a line of JSON."""
    out, sys.stdout = sys.stdout, sys.stderr
    import torch

    began = time.perf_counter()
    workload = CASES[case]()
    weights = torch.cuda.memory_allocated() / 2**20
    if variant == "compile_causal":
        workload.model = models.causal(workload.model)
    elif variant == "compile_flex":
        workload.model.set_attn_implementation("flex_attention")
    step = workload.step((), "coda" if variant == "coda" else "inductor")
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for number, _ in enumerate(sys.stdin):
        if number:
            line: Any = worth.sustained(step, settle=0.7, sample=1.0)
        else:
            facts = worth.facts(step)
            peak = 1024 * facts["peak"] - weights
            line = {"peak_mib": peak, "kernels": facts["kernels"], "first_s": first}
            line["torch"] = torch.__version__
        print(json.dumps(line), file=out, flush=True)
