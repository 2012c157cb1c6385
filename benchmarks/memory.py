# SPDX-License-Identifier: Apache-2.0
"""Time against memory: what a training step takes at each peak, under torch.compile and under coda.

``python -m benchmarks memory OUT.json --case NAME --setting BACKEND:WHAT ...`` compiles one model
under each setting and times all in turn, there and back, sustained. BACKEND is compile or coda;
WHAT is ``none``, a number (``torch._functorch.config.activation_memory_budget``), ``ckpt`` (a
checkpoint a layer), ``ckpt2`` (every second layer), ``op`` (selective checkpoints as torchtitan has
them: attention and every second product are kept) or, for coda, the option ``memory`` ("20 GiB").
SDPA is told to be causal. Beside the milliseconds: the peak over weights and batch, what the
forward pass keeps, and the peak that was predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from . import environment, families, worth, worth_models

GIB = 2**30
CASES: dict[str, Callable[[], worth_models.Workload]] = {
    "8B x8": functools.partial(worth_models.stock, "8B", 8),
    "8B x4": functools.partial(worth_models.stock, "8B", 4),
    "8B": functools.partial(worth_models.stock, "8B-32", 32),
    "qwen3 x6": functools.partial(worth_models.stock, "qwen3", 6),
    "lora 8B x8": functools.partial(worth_models.lora, "8B", layers=8),
    "olmoe x8": functools.partial(worth_models.stock, "olmoe", 8),
}
SETTINGS = ("compile:none", "compile:0.5", "compile:ckpt", "coda:none", "coda:0.5", "coda:ckpt")


def main(arguments: list[str]) -> None:
    """Measure one case under all settings."""
    parser = argparse.ArgumentParser("python -m benchmarks memory", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--case", choices=CASES, default="8B x8")
    parser.add_argument("--setting", action="append", help="repeatable")
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"results": {}}
    if options.file.exists():
        found = json.loads(options.file.read_text())
    found["environment"] = environment.describe(arguments, options.commit, "benchmarks.memory")
    workload = CASES[options.case]()
    stock = getattr(workload.model, "get_base_model", lambda: workload.model)()
    stock.config.use_cache = False  # a checkpoint would fill the cache twice
    families.make_causal(stock)
    rows, steps = found["results"].setdefault(options.case, {}), {}
    for setting in options.setting or SETTINGS:
        steps[setting], rows[setting] = prepared(workload, *setting.split(":", 1))
        print(setting, rows[setting], flush=True)
    ready = [setting for setting in steps if "error" not in rows[setting]]
    for setting in (*ready, *reversed(ready)):
        ms = worth.sustained(steps[setting], 0.5, 1.5)
        rows[setting].setdefault("samples", []).append(ms)
    for setting in ready:
        samples = rows[setting]["samples"]
        rows[setting]["ms"] = sum(samples) / len(samples)
        print(options.case, setting, json.dumps(rows[setting]), flush=True)
    options.file.write_text(json.dumps(found, indent=1))


def prepared(workload: worth_models.Workload, backend: str, what: str) -> tuple[Any, Any]:
    """The step under one setting, compiled, and its memory."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    budget = float(what) if what.replace(".", "", 1).isdigit() else 1.0
    options = {"memory": what} if what.endswith("GiB") else {}
    with (
        torch._functorch.config.patch(activation_memory_budget=budget),
        checkpointed(workload.model, what),
    ):
        name = "inductor" if backend == "compile" else "coda"
        function = torch.compile(workload.model, backend=name, dynamic=False, options=options)
        try:
            return facts(workload, function)
        except (RuntimeError, ValueError) as error:
            return None, {"error": environment.scrub(f"{type(error).__name__}: {error}")[:400]}


def facts(workload: worth_models.Workload, function: Any) -> tuple[Any, dict[str, Any]]:
    """A step of ``function``, and its peak and what it keeps, in GiB."""

    def step() -> None:
        function(**workload.batch).loss.backward()
        workload.model.zero_grad(set_to_none=True)

    step()
    step()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = function(**workload.batch).loss
    kept = torch.cuda.memory_allocated() - base
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - base
    workload.model.zero_grad(set_to_none=True)
    found = {"peak": peak / GIB, "kept": kept / GIB}
    import coda_inductor

    said = coda_inductor.reports()[-1].memory if coda_inductor.reports() else None
    if said is not None:
        found |= {"predicted": said.peak / GIB, "ms_predicted": said.ms}
    coda_inductor.report.forget()
    return step, found


@contextlib.contextmanager
def checkpointed(model: Any, what: str) -> Iterator[None]:
    """``model`` with its layers in checkpoints."""
    every = {"ckpt": 1, "op": 1, "ckpt2": 2}.get(what, 0)
    layers = worth_models.blocks(model)
    was = list(layers)
    more = {"context_fn": selective} if what == "op" else {}
    for i in range(0, len(layers), every) if every else ():
        layers[i] = checkpoint_wrapper(was[i], **more)
    try:
        yield
    finally:
        for i, layer in enumerate(was):
            layers[i] = layer


def selective() -> Any:
    """The contexts of torchtitan's selective checkpoints, per op (0.2.2)."""
    aten = torch.ops.aten
    saved = {
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten.max.default,
    }
    count = {False: 0, True: 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op == aten.mm.default:
            count[context.is_recompute] += 1
            if count[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
