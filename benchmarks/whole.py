# SPDX-License-Identifier: Apache-2.0
"""A whole model: Llama 3.1 8B, 32 layers, random bf16 weights, forward and backward on one GPU.

``python -m benchmarks whole OUT.json`` starts a process a variant. They compile side by side, their
weights given back meanwhile (storages of no bytes, as FSDP2 leaves them), and then take turns, A B
B A: milliseconds of a step (``worth.sustained``), joules, and the peak with weights and gradients.
A variant is "RECIPE BACKEND [ROWSxTOKENS] [adamw | adamw8]", as in ``--variant "rowwise coda 2x8192
adamw"``; OUT.json keeps those that it has. ``--render`` writes docs/results/whole.md from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from . import energy, environment, families, headline, models, worth, worth_models

VARIANTS = ("bf16 eager", *(f"{recipe} {backend}" for recipe in ("bf16", "rowwise", "tensorwise")
                            for backend in ("compile", "causal", "coda")))  # fmt: skip
#: ``causal``: torch.compile with SDPA told to be causal, as transformers does from 5.23 on.
BACKENDS = {"eager": "", "compile": "inductor", "causal": "inductor", "coda": "coda"}
MODEL = "8B-32"
LAYERS, WIDTH = (models.LLAMAS[MODEL][name] for name in ("num_hidden_layers", "hidden_size"))
#: Samples of a variant, FLOP/s of an H100's or H200's tensor cores in bf16, dense.
TURNS, PEAK = 2, 989e12
PAGE = environment.REPOSITORY / "docs" / "results" / "whole.md"


def main(arguments: list[str]) -> None:
    """Measure, render; or, as one of the processes, be measured."""
    parser = headline.parser_of("whole", __doc__, "variant")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args(arguments)
    if options.part:
        answer(options.part, options.file.with_suffix(".lock"))
    elif options.render:
        put("measured", table(json.loads(options.file.read_text())))
    else:
        names = options.names or list(VARIANTS)
        for name in names:
            parsed(name)
        print(table(headline.measured("whole", names, options, TURNS)))


def parsed(variant: str) -> tuple[str, str, int, int, str]:
    """Recipe, backend, rows, tokens of each and optimizer; ValueError where it says something
    else."""
    recipe, backend, *more = variant.split()
    shape = next((word for word in more if "x" in word), "1x8192")
    others = [word for word in more if word != shape]
    rows, tokens = map(int, shape.split("x"))
    if backend not in BACKENDS or others not in ([], ["adamw"], ["adamw8"]):
        raise ValueError(f"{variant!r} is no variant such as 'bf16 coda 1x8192 adamw'")
    return recipe, backend, rows, tokens, "".join(others)


def answer(variant: str, lock: Path) -> None:
    """Compile, then answer each line of stdin with a line of JSON."""
    sys.stdout = sys.stderr  # answers alone go to the other one
    os.environ.setdefault("CODA_TUNE", "never")
    began = time.perf_counter()
    recipe, backend, rows, tokens, optimizer = parsed(variant)
    with worth.turn(lock):
        if recipe == "bf16":
            workload = worth_models.stock(MODEL, LAYERS)
        else:
            workload = worth_models.float8(recipe, MODEL, LAYERS)
        if backend == "causal":
            families.make_causal(workload.model)
        ids = torch.randint(models.LLAMAS[MODEL]["vocab_size"], (rows, tokens), device="cuda")
        workload.batch = {"input_ids": ids, "labels": ids}
        parameters = sum(p.numel() for p in workload.model.parameters())
        parameters -= workload.model.get_input_embeddings().weight.numel()
        sizes = {p: p.untyped_storage().nbytes() for p in workload.model.parameters() if p.ndim > 1}
        give_back(workload, sizes)
    step = workload.step((), BACKENDS[backend])
    awake = functools.partial(turn, workload, sizes, optimizer, lock)
    with worth.compiled(step, awake, eager=backend == "eager"):
        line: dict[str, Any] = {"first_s": time.perf_counter() - began, "parameters": parameters}
        line |= worth.facts(step)
    for number, _ in enumerate(sys.stdin):
        if number:
            with awake(), contextlib.suppress(energy.EnergyError):
                step()
                line = {"ms": worth.sustained(step, 1.5, 3.0, least=3)}
                line |= energy.joules(step, 3.0, energy.Counter())
        print(json.dumps(line), flush=True, file=sys.__stdout__)


@contextlib.contextmanager
def turn(
    workload: worth_models.Workload, sizes: dict[Any, int], optimizer: str, lock: Path
) -> Iterator[None]:
    """This process has the GPU, random weights of these bytes, and an optimizer without state."""
    with worth.turn(lock):
        with torch.no_grad():
            for weight, size in sizes.items():
                weight.untyped_storage().resize_(size)
                weight.normal_(std=0.02)
        parameters = list(workload.model.parameters())
        if optimizer == "adamw":
            workload.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        elif optimizer:
            from torchao.optim import AdamW8bit

            workload.optimizer = AdamW8bit(parameters, lr=1e-5)
        try:
            yield
        except RuntimeError as error:
            text = f"{type(error).__name__}: {str(error)[:160]}"
            print(json.dumps({"error": text}), flush=True, file=sys.__stdout__)
            os._exit(1)  # with the lock: its memory is taken until it ends
        give_back(workload, sizes)


def give_back(workload: worth_models.Workload, sizes: dict[Any, int]) -> None:
    """Leave the memory of weights, gradients and the optimizer's state to others."""
    workload.optimizer = None
    workload.model.zero_grad(set_to_none=True)
    for weight in sizes:
        weight.untyped_storage().resize_(0)


def put(mark: str, text: str) -> None:
    """Write ``text`` between the marks of this name in the page."""
    between = re.compile(f"(?<=<!-- {mark} -->\n).*?(?=<!-- /{mark} -->)", re.DOTALL)
    PAGE.write_text(between.sub(lambda _: text, PAGE.read_text()))


def where(about: dict[str, Any]) -> str:
    """A sentence about the machine."""
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    return f"Measured on one {about['gpu']}: {versions}; commit {about['commit']}."


def table(found: dict[str, Any]) -> str:
    """What stands between the marks of docs/results/whole.md."""
    rows, about, errors = [], found["environment"], []
    for name, result in found["results"].items():
        samples = [each for each in result["samples"] if "ms" in each]
        if not samples:
            errors.append(f"\n{name} did not run: {result.get('error', 'it ended')}\n")
            continue
        _, _, batch, length, _ = parsed(name)
        tokens, ms = batch * length, statistics.median(each["ms"] for each in samples)
        flops = 6e3 * tokens * (result["parameters"] + LAYERS * WIDTH * length) / ms
        joules = [each["joules"] / tokens for each in samples if "joules" in each]
        rows.append([
            name, f"{ms:.0f}", f"{1e3 * tokens / ms:,.0f}", f"{flops / 1e12:.0f}",
            f"{flops / PEAK:.1%}", f"{result['peak']:.1f}",
            f"{1e3 * statistics.mean(joules):.1f}" if joules else "-", f"{result['first_s']:.0f}",
        ])  # fmt: skip
    heads = ("variant", "ms", "tokens a second", "TFLOP/s", "of the peak", "peak GiB",
             "mJ a token", "first")  # fmt: skip
    text = tabulate(rows, heads, "github", disable_numparse=True)
    return f"{where(about)}\n\n{text}\n{''.join(errors)}"
