# SPDX-License-Identifier: Apache-2.0
"""Time against memory: what a training step takes at each peak, under torch.compile and under coda.

``python -m benchmarks memory OUT.json --case NAME --setting BACKEND:WHAT ...`` compiles one model
under each setting and times all in turn, there and back, sustained. BACKEND is compile, coda, or
solver: coda's graph, split by torch's own solver with coda's milliseconds as its prices;
WHAT is ``none``, a number (the option ``memory`` for coda, for the others
``torch._functorch.config.activation_memory_budget``), ``ckpt`` (a checkpoint a layer), ``ckpt2``
(every second layer), ``op`` (selective checkpoints as torchtitan has them: attention and every
second product are kept) or, for coda, a peak ("20 GiB"). ``coda:1.0`` is ``none``, predicted.
SDPA is told to be causal. Beside the milliseconds: the peak over weights and batch, what the
forward pass keeps, and the peak that was predicted. ``python -m benchmarks memory PICTURE.svg
--draw OUT.json ...`` draws milliseconds against peaks, a panel a case; PICTURE_dark.svg is
for dark pages.
"""

import contextlib
import functools
import gc
import json
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

from . import environment, measure, models, worth, worth_models

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


#: With how many layers.
FAMILIES = (
    ("qwen3", 6), ("olmoe", 8), ("olmo2", 6), ("phi3", 8), ("qwen2", 6), ("qwen3_moe", 4),
    ("gemma3", 8), ("mistral", 6), ("gptneox", 8), ("starcoder2", 6), ("modernbert", 8), ("t5", 8),
)  # fmt: skip
#: Their masks say more than "causal", or less.
MASKED = ("gemma3", "modernbert", "t5")
CASES: dict[str, Callable[[], worth_models.Workload]] = {
    **{f"8B x{n}": functools.partial(worth_models.stock, "8B-32", n) for n in (4, 8, 32)},
    **{f"8B x32, {n} rows": functools.partial(rows_of, n) for n in (2, 4)},
    "lora 8B x8": functools.partial(worth_models.lora, "8B-32", layers=8),
    **{f"{name} x{n}": functools.partial(worth_models.stock, name, n) for name, n in FAMILIES},
}
SETTINGS = ("compile:none", "compile:0.5", "compile:ckpt", "coda:none", "coda:0.5", "coda:ckpt")


def main(arguments: list[str]) -> None:
    """Measure one case under all settings."""
    parser = measure.parser("memory", __doc__)
    parser.add_argument("--case", choices=CASES, default="8B x8")
    parser.add_argument("--setting", action="append", help="repeatable")
    parser.add_argument("--draw", type=Path, nargs="+", help="results that FILE shows")
    options = parser.parse_args(arguments)
    if options.draw:
        return draw([json.loads(path.read_text()) for path in options.draw], options.file)
    found: dict[str, Any] = {"results": {}}
    if options.file.exists():
        found = json.loads(options.file.read_text())
    found["environment"] = environment.describe(arguments, options.commit, "benchmarks.memory")
    workload = CASES[options.case]()
    stock = getattr(workload.model, "get_base_model", lambda: workload.model)()
    stock.config.use_cache = False  # a checkpoint would fill the cache twice
    if not options.case.startswith(MASKED):
        models.make_causal(stock)
    rows, steps = found["results"].setdefault(options.case, {}), {}
    for setting in options.setting or SETTINGS:
        steps[setting], rows[setting] = prepared(workload, *setting.split(":", 1))
        print(setting, rows[setting], flush=True)
        options.file.write_text(json.dumps(found, indent=1))
    ready = [setting for setting in steps if "error" not in rows[setting]]
    for setting in measure.in_turns(ready, 2):
        ms = worth.sustained(steps[setting], 0.5, 1.5)
        samples = rows[setting].setdefault("samples", [])
        samples.append(ms)
        rows[setting]["ms"] = sum(samples) / len(samples)
        print(options.case, setting, json.dumps(rows[setting]), flush=True)
        options.file.write_text(json.dumps(found, indent=1))
    return None


#: What pictures call cases (layers are said behind them) and settings.
NAMES = {"8B": "Llama 8B", "lora 8B": "LoRA of Llama 8B", "qwen3": "Qwen3 1.7B", "olmoe": "OLMoE",
         "olmo2": "OLMo 2", "phi3": "Phi-3 mini", "qwen2": "Qwen2.5 7B",
         "qwen3_moe": "Qwen3 30B-A3B", "gemma3": "Gemma 3 1B", "mistral": "Mistral 7B",
         "gptneox": "Pythia 1.4B", "starcoder2": "StarCoder2 3B", "modernbert": "ModernBERT",
         "t5": "T5 v1.1 large"}  # fmt: skip
LABELS = {"none": "no limit", "op": "selective", "ckpt": "every layer", "ckpt2": "every 2nd layer"}
#: Behind a picture's name -> its colors: text, torch.compile's points, ours.
THEMES = {"": ("#1f2328", "#656d76", "#0969da"), "_dark": ("#e6edf3", "#9198a1", "#58a6ff")}


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Milliseconds against GiB of each case in these files, in a picture for light pages and one
    for dark ones: a line through what no other setting of the same backend beats in both."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cases = [
        (f"{titled(case)}, {file['environment']['gpu'].split()[1]}", rows)
        for file in results for case, rows in file["results"].items()
    ]  # fmt: skip
    for suffix, (ink, *colors) in THEMES.items():
        look = {"svg.fonttype": "none", "svg.hashsalt": "memory", "text.color": ink}
        edges = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"))
        with mpl.rc_context(look | dict.fromkeys(edges, ink)):
            figure = Figure(figsize=(9, 3.6 * -(-len(cases) // 2)), layout="constrained")
            panels = figure.subplots(-(-len(cases) // 2), 2, squeeze=False).flat
            for axes, (name, rows) in zip(panels, cases, strict=False):
                _panel(axes, name, rows, colors)
            out = path.with_stem(path.stem + suffix)
            figure.savefig(out, metadata={"Date": None}, transparent=True)


def titled(case: str) -> str:
    """What a picture calls a case: ``8B x8`` is Llama 8B, 8 layers."""
    name, _, layers = case.partition(" x")
    return f"{NAMES.get(name, name)}, {layers} layers"


def _panel(axes: Any, title: str, rows: dict[str, Any], colors: Sequence[str]) -> None:
    for backend, color, up in zip(("compile", "coda"), colors, (1, -1), strict=True):
        mine = sorted(
            (row["peak"], row["ms"], setting.partition(":")[2])
            for setting, row in rows.items() if setting.startswith(backend) and "ms" in row
        )  # fmt: skip
        best = [(x, ms) for x, ms, _ in mine if all(ms < other for y, other, _ in mine if y < x)]
        axes.scatter([x for x, *_ in mine], [ms for _, ms, _ in mine], s=14, color=color)
        label = backend.replace("compile", "torch.compile")
        axes.plot(*zip(*best, strict=True), marker="o", color=color, label=label)
        said: dict[tuple[int, int], list[str]] = {}  # points on top of each other share a label
        for x, ms, what in mine:
            said.setdefault((round(4 * x), round(ms)), []).append(LABELS.get(what, what))
        at = {(round(4 * x), round(ms)): (x, ms) for x, ms, _ in mine}
        for spot, words in said.items():
            words.sort(key=lambda word: -float(word) if word[0].isdigit() else -2.0)
            text = " to ".join((words[0], words[-1])) if len(words) > 2 else ", ".join(words)
            axes.annotate(text, at[spot], (4 * up, 5 * up), color=color, fontsize=7.5,
                          textcoords="offset points", ha="left" if up > 0 else "right",
                          va="bottom" if up > 0 else "top")  # fmt: skip
    axes.set(title=title, ylabel="ms a step",
             xlabel="peak over weights and batch, GiB")  # fmt: skip
    axes.margins(0.22, 0.3)  # room for labels and the legend
    axes.grid(color="#8080801f")
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def prepared(workload: worth_models.Workload, backend: str, what: str) -> tuple[Any, Any]:
    """The step under one setting, compiled, and its memory."""
    gc.collect()
    torch.cuda.empty_cache()
    number = what.replace(".", "", 1).isdigit()
    budget = float(what) if number and backend != "coda" else 1.0
    options: dict[str, Any] = {"memory": what} if what.endswith("GiB") else {}
    if number and backend == "coda":
        options = {"memory": float(what)}
    layers = worth_models.blocks(workload.model)
    plain, mine = list(layers), checkpointed(layers, what)

    def call(**batch: Any) -> Any:
        return workload.model(**batch)

    name = "inductor" if backend == "compile" else "coda"
    function = torch.compile(measure.own(call), backend=name, dynamic=False, options=options)

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
