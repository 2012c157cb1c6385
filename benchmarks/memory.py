# SPDX-License-Identifier: Apache-2.0
"""Time against memory: what a training step takes at each peak, under torch.compile and under coda.

``python -m benchmarks memory OUT.json --case NAME --setting BACKEND:WHAT ...`` compiles one model
under each setting and times all in turn, there and back, sustained. BACKEND is compile, coda, or
solver: coda's graph, split by torch's own solver with coda's milliseconds as its prices;
WHAT is ``none``, a number (``torch._functorch.config.activation_memory_budget``), ``ckpt`` (a
checkpoint a layer), ``ckpt2`` (every second layer), ``op`` (selective checkpoints as torchtitan has
them: attention and every second product are kept) or, for coda, the option ``memory`` ("20 GiB").
SDPA is told to be causal. Beside the milliseconds: the peak over weights and batch, what the
forward pass keeps, and the peak that was predicted. ``python -m benchmarks memory PICTURE.svg
--draw OUT.json ...`` draws milliseconds against peaks, a panel a case.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.partitioners as partitioners
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from coda_inductor.compat import CustomPartitionerFn
from coda_inductor.gpu import gpu_of
from coda_inductor.memory import costs

from . import environment, models, worth, worth_models

GIB = 2**30


class Solver(CustomPartitionerFn):
    """torch's partitioner in place of coda's."""

    def __call__(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        return partitioners.min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def uuid(self) -> None:
        """None: nothing is cached."""


def solved() -> contextlib.AbstractContextManager[Any]:
    """A context in which :class:`Solver` splits graphs."""
    price = functools.partial(costs.milliseconds, gpu=gpu_of())
    stack = contextlib.ExitStack()
    stack.enter_context(torch._inductor.config.patch(custom_partitioner_fn=Solver()))
    stack.enter_context(mock.patch.object(partitioners, "estimate_runtime", price))
    return stack


def rows_of(count: int) -> worth_models.Workload:
    """All layers of Llama 8B, with ``count`` sequences of 8192 tokens."""
    workload = worth_models.stock("8B-32", 32)
    workload.batch = {name: tensor.repeat(count, 1) for name, tensor in workload.batch.items()}
    return workload


FAMILIES = (
    ("qwen3", 6), ("olmoe", 8), ("olmo2", 6), ("phi3", 8), ("qwen2", 6), ("qwen3_moe", 4),
)  # fmt: skip
CASES: dict[str, Callable[[], worth_models.Workload]] = {
    **{f"8B x{n}": functools.partial(worth_models.stock, "8B-32", n) for n in (4, 8, 32)},
    **{f"8B x32, {n} rows": functools.partial(rows_of, n) for n in (2, 4)},
    "lora 8B x8": functools.partial(worth_models.lora, "8B-32", layers=8),
    **{f"{name} x{n}": functools.partial(worth_models.stock, name, n) for name, n in FAMILIES},
}
SETTINGS = ("compile:none", "compile:0.5", "compile:ckpt", "coda:none", "coda:0.5", "coda:ckpt")


def main(arguments: list[str]) -> None:
    """Measure one case under all settings."""
    parser = argparse.ArgumentParser("python -m benchmarks memory", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--case", choices=CASES, default="8B x8")
    parser.add_argument("--setting", action="append", help="repeatable")
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    parser.add_argument("--draw", type=Path, nargs="+", help="results that FILE shows")
    options = parser.parse_args(arguments)
    if options.draw:
        return draw(
            [json.loads(path.read_text())["results"] for path in options.draw], options.file
        )
    found: dict[str, Any] = {"results": {}}
    if options.file.exists():
        found = json.loads(options.file.read_text())
    found["environment"] = environment.describe(arguments, options.commit, "benchmarks.memory")
    workload = CASES[options.case]()
    stock = getattr(workload.model, "get_base_model", lambda: workload.model)()
    stock.config.use_cache = False  # a checkpoint would fill the cache twice
    models.make_causal(stock)
    rows, steps = found["results"].setdefault(options.case, {}), {}
    for setting in options.setting or SETTINGS:
        steps[setting], rows[setting] = prepared(workload, *setting.split(":", 1))
        print(setting, rows[setting], flush=True)
    ready = [setting for setting in steps if "error" not in rows[setting]]
    for setting in (*ready, *reversed(ready)):
        ms = worth.sustained(steps[setting], 0.5, 1.5)
        samples = rows[setting].setdefault("samples", [])
        samples.append(ms)
        rows[setting]["ms"] = sum(samples) / len(samples)
        print(options.case, setting, json.dumps(rows[setting]), flush=True)
        options.file.write_text(json.dumps(found, indent=1))
    return None


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Milliseconds against GiB of each case in ``results``: a line through what no other setting of
    the same backend beats in both."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cases = [case for each in results for case in each.items()]
    figure = Figure(figsize=(8, 3.2 * -(-len(cases) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(cases) // 2), 2, squeeze=False).flat
    for axes, (name, rows) in zip(panels, cases, strict=False):
        for backend, color in {"compile": "#9aa4b2", "coda": "#2f81f7"}.items():
            of = [row for setting, row in rows.items() if setting.startswith(backend)]
            mine = sorted((row["peak"], row["ms"]) for row in of if "ms" in row)
            best = [(x, ms) for x, ms in mine if all(ms < other for y, other in mine if y < x)]
            axes.scatter(*zip(*mine, strict=True), s=14, color=color)
            label = backend.replace("compile", "torch.compile")
            axes.plot(*zip(*best, strict=True), marker="o", color=color, label=label)
        axes.set(title=name, xlabel="peak over weights and batch, GiB", ylabel="ms a step")
        axes.grid(color="#00000018")
    figure.axes[0].legend(frameon=False)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memory"}):
        figure.savefig(path, metadata={"Date": None})


def prepared(workload: worth_models.Workload, backend: str, what: str) -> tuple[Any, Any]:
    """The step under one setting, compiled, and its memory."""
    gc.collect()
    torch.cuda.empty_cache()
    budget = float(what) if what.replace(".", "", 1).isdigit() else 1.0
    options = {"memory": what} if what.endswith("GiB") else {}
    layers = worth_models.blocks(workload.model)
    plain, mine = list(layers), checkpointed(layers, what)

    def call(**batch: Any) -> Any:
        return workload.model(**batch)

    # Dynamo keeps what it compiled by code object: each setting has its own.
    own = types.FunctionType(call.__code__.replace(), globals(), None, None, call.__closure__)
    name = "inductor" if backend == "compile" else "coda"
    function = torch.compile(own, backend=name, dynamic=False, options=options)

    @contextlib.contextmanager
    def setting() -> Iterator[None]:
        _put(layers, mine)
        try:
            split = solved() if backend == "solver" else contextlib.nullcontext()
            with torch._functorch.config.patch(activation_memory_budget=budget), split:
                yield
        finally:
            _put(layers, plain)

    def step() -> None:
        with setting():
            function(**workload.batch).loss.backward()
            workload.model.zero_grad(set_to_none=True)

    try:
        step()
        step()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with setting():
            loss = function(**workload.batch).loss
            kept = torch.cuda.memory_allocated() - base
            loss.backward()
        peak = torch.cuda.max_memory_allocated() - base
    except (RuntimeError, ValueError) as error:
        return None, {"error": environment.scrub(f"{type(error).__name__}: {error}")[:400]}
    workload.model.zero_grad(set_to_none=True)
    found = {"peak": peak / GIB, "kept": kept / GIB}
    import coda_inductor

    if backend == "coda" and (said := coda_inductor.reports()[-1].memory) is not None:
        found |= {"predicted": said.peak / GIB, "ms_predicted": said.ms}
    return step, found


def _put(layers: Any, these: Sequence[Any]) -> None:
    for i, layer in enumerate(these):
        layers[i] = layer


def checkpointed(layers: Sequence[Any], what: str) -> list[Any]:
    """``layers``, those in checkpoints that ``what`` says."""
    every = {"ckpt": 1, "op": 1, "ckpt2": 2}.get(what, len(layers) + 1)
    more = {"context_fn": selective} if what == "op" else {}
    return [
        checkpoint_wrapper(layer, **more) if i % every == 0 and every <= len(layers) else layer
        for i, layer in enumerate(layers)
    ]


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
