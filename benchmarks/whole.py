# SPDX-License-Identifier: Apache-2.0
"""A whole model: Llama 3.1 8B, 32 layers, random bf16 weights, forward and backward on one GPU.

``python -m benchmarks whole OUT.json`` starts a process a variant. They compile side by side, their
weights given back meanwhile (storages of no bytes, as FSDP2 leaves them), and then take turns, A B
B A: milliseconds of a step (``worth.sustained``), joules, and the peak with weights and gradients.
A variant is "RECIPE BACKEND [ROWSxTOKENS] [adamw | adamw8]", as in ``--variant "rowwise coda 2x8192
adamw"``; OUT.json keeps those that it has. ``--render`` writes docs/results/whole.md from it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
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
_HEAD = """# A whole model

For readers who ask what one GPU makes of Llama 3.1 8B.

All 32 layers, random bf16 weights, one sequence of 8192 tokens unless a row says otherwise (rows x
tokens), forward and backward, called as users call it: no mask, labels given, the loss in the
graph. FP8 is torchao's training recipe on all linear layers but the head. Steps run back to back,
A B B A. The peak has weights (15 GiB) and gradients (15 GiB) in it. TFLOP/s: 6 FLOP for each token
and parameter, the embedding's left out, and 6 T^2 d a layer and sequence for the causal half of
attention over T tokens of width d. The share is of 989 TFLOP/s, bf16's, also in FP8. *First* is
seconds until the first step is done, all rows compiling at once. Written by `python -m benchmarks
whole OUT.json --render`.
"""
_PUBLISHED = """
Published, a GPU of eight H100s, sequences of 8192 tokens. Both have communication and AdamW in
them, which here only rows with adamw have, and shard their states.

| | tokens a second | what differs |
| --- | --- | --- |
| [Megatron-Bridge 25.11]\
(https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html) \
| 14,451 | FP8 by tensor, Transformer Engine; a step of AdamW every 16 sequences; 744 TFLOP/s by \
the formula above |
| [torchtitan, end of 2024]\
(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md) \
| 8,532 | FP8 by tensor, FSDP2, torch.compile, two sequences, some activations recomputed; \
H100s of 500 W |
"""


def main(arguments: list[str]) -> None:
    """Measure, render; or, as one of the processes, be measured."""
    parser = argparse.ArgumentParser("python -m benchmarks whole", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--variant", dest="variants", action="append", help="repeatable")
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        answer(options.part, options.file.with_suffix(".lock"))
        return
    found: dict[str, Any] = {"results": {}}
    if options.file.exists():
        found = json.loads(options.file.read_text())
    if options.render:
        path = environment.REPOSITORY / "docs" / "results" / "whole.md"
        path.write_text(page(found))
        return
    found["environment"] = environment.describe(sys.argv[1:], options.commit, "benchmarks.whole")
    names = options.variants or list(VARIANTS)
    for name in names:
        parsed(name)
    command, log = ["whole", str(options.file), "--part"], options.file.with_suffix(".log")

    def keep(results: dict[str, Any]) -> None:
        found["results"] |= results
        options.file.write_text(json.dumps(found, indent=1))

    running = {name: headline.start([*command, name], log) for name in names}
    ended = running.keys() - headline.in_turn(running, TURNS, keep)
    keep({name: {"error": f"it ended: see {log.name}"} for name in ended})
    for process in running.values():
        process.kill()
    print(page(found))


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


def page(found: dict[str, Any]) -> str:
    """docs/results/whole.md."""
    rows, about, errors = [], found["environment"], []
    for name, result in found["results"].items():
        samples = [each for each in result.get("samples", ()) if "ms" in each]
        if not samples:
            errors.append(f"- {name}: {result.get('error', 'it ended')}")
            continue
        _, _, batch, length, _ = parsed(name)
        ms = statistics.median(each["ms"] for each in samples)
        tokens, seconds = batch * length, ms / 1e3
        flop = 6 * tokens * (result["parameters"] + LAYERS * WIDTH * length)
        joules = [each["joules"] / tokens for each in samples if "joules" in each]
        rows.append([
            name, f"{ms:.0f}", f"{tokens / seconds:,.0f}", f"{flop / seconds / 1e12:.0f}",
            f"{flop / seconds / PEAK:.1%}", f"{result['peak']:.1f}",
            f"{1e3 * statistics.mean(joules):.1f}" if joules else "-", f"{result['first_s']:.0f}",
        ])  # fmt: skip
    heads = ("variant", "ms", "tokens a second", "TFLOP/s", "of the peak", "peak GiB",
             "mJ a token", "first")  # fmt: skip
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    where = f"\nMeasured on one {about['gpu']}: {versions}; commit {about['commit']}.\n"
    table = tabulate(rows, heads, "github", disable_numparse=True)
    lost = "\nWhat did not run:\n\n" + "\n".join(errors) + "\n" if errors else ""
    return f"{_HEAD}{where}\n{table}\n{lost}{_PUBLISHED}"
