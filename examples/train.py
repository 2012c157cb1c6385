# SPDX-License-Identifier: Apache-2.0
"""Train a stock Hugging Face Llama on real text under eager, torch.compile and ``backend="coda"``.

The proof that the backend trains: per seed, every backend starts from the same random weights and
sees the same batches in the same order, so that whatever separates two loss curves is rounding. How
much rounding alone separates two runs is measured too: ``eager_reversed`` is eager with the rows of
each batch in reverse order, the same loss in exact arithmetic.

``train_text.py`` has the text, ``train_report.py`` the comparison and its plot.

Usage:
    python examples/train.py --backends eager,inductor,coda --seeds 0,1,2 --steps 300 --out FILE
    python examples/train.py --plot FILE --svg docs/training.svg --page docs/training.md
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_report  # noqa: E402
from train_text import Batches, corpus, cut  # noqa: E402

import coda_inductor  # noqa: E402  only for its reports: backend="coda" needs no import
from benchmarks import environment  # noqa: E402

#: What torch.compile is called with, by name; None: not compiled.
BACKENDS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "eager_reversed": None,
    "inductor": {"backend": "inductor"},
    "coda": {"backend": "coda", "options": {"gate": "always"}},
    "coda_default": {"backend": "coda"},
}
#: Backends that train with the first seed only: they are there for the time of a step.
FIRST_SEED_ONLY = ("coda_default",)
#: Steps that are not timed; the first one compiles.
UNTIMED = 10
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """A model (fields of ``LlamaConfig``), its batch of ``batch`` rows of ``length`` tokens, and
    the highest learning rate.
    """

    model: dict[str, int]
    length: int
    batch: int
    rate: float


SIZES = {
    "tiny": Size(
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2},
        length=64, batch=8, rate=3e-3,
    ),
    "small": Size(
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6,
         "num_attention_heads": 16, "num_key_value_heads": 4},
        length=1024, batch=16, rate=6e-4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How every run of one results file trains.

    Attributes:
        size: key of ``SIZES``.
        device: ``"cuda"`` or ``"cpu"``.
        params: dtype of the parameters and of AdamW's state, ``"fp32"`` or ``"bf16"``.
        autocast: run forward and loss under bfloat16 autocast.
        steps: optimizer steps.
        betas, weight_decay: AdamW's.
        clip: the largest norm of all gradients together.
        warmup: share of the steps in which the learning rate grows linearly to the size's rate.
        floor: the share of that rate at which its cosine ends.
    """

    size: str
    device: str
    params: str
    autocast: bool
    steps: int
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: float = 0.1
    floor: float = 0.1

    def rate(self, step: int) -> float:
        """Learning rate of ``step`` (from 0) as a share of the highest."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        turn = math.pi * (step - warm) / max(1, self.steps - warm)
        return self.floor + (1 - self.floor) * (1 + math.cos(turn)) / 2

    def context(self) -> AbstractContextManager[Any]:
        """What forward and loss run in."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.autocast)


def main() -> None:
    """Train or plot; see the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ",".join(BACKENDS)
    parser.add_argument("--backends", default="eager,inductor,coda", help=f"some of {names}")
    parser.add_argument("--seeds", default="0", help="comma-separated numbers")
    parser.add_argument("--steps", type=int, default=300)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--size", choices=tuple(SIZES), help="default: small on a GPU, else tiny")
    parser.add_argument("--params", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--no-autocast", action="store_true", help="with fp32: no bf16 at all")
    parser.add_argument("--commit", help="the commit, for a copy of the tree without .git")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw results, train nothing")
    parser.add_argument("--svg", type=Path, help="where --plot draws the loss curves")
    parser.add_argument("--page", type=Path, help="where --plot writes the page of tables")
    args = parser.parse_args()
    if args.plot:
        if not (args.svg or args.page):
            parser.error("--plot needs --svg or --page: where to write")
        train_report.write(json.loads(args.plot.read_text()), args.svg, args.page)
        return
    backends = args.backends.split(",")
    if unknown := [name for name in backends if name not in BACKENDS]:
        parser.error(f"--backends: unknown {', '.join(unknown)}; known: {', '.join(BACKENDS)}")
    recipe = Recipe(
        size=args.size or ("small" if args.device == "cuda" else "tiny"),
        device=args.device,
        params=args.params,
        autocast=args.params == "fp32" and not args.no_autocast,
        steps=args.steps,
    )
    described = environment.describe([], args.commit)
    described["command"] = environment.scrub(" ".join(["python", *sys.argv]))
    run(recipe, backends, [int(seed) for seed in args.seeds.split(",")], described, args.out)


def run(
    recipe: Recipe, backends: list[str], seeds: list[int], described: dict, out: Path | None
) -> dict:
    """Train every backend with every seed and print the comparison.

    ``out`` is rewritten after each run, so that a run that is cut off leaves what it has.

    Returns:
        ``{"environment", "recipe", "model", "text", "runs": [...]}``; a run is what :func:`train`
        returns, with ``"backend"``, ``"seed"``, ``"fired_training"`` and ``"fired_evaluation"``
        (``counters["coda"]`` of the two graphs), ``"sites"`` (how the GEMMs of both run).
    """
    size = SIZES[recipe.size]
    text, description = corpus()
    rows = cut(text, size.length)
    results: dict[str, Any] = {
        "environment": described,
        "recipe": dataclasses.asdict(recipe),
        "model": dataclasses.asdict(size),
        "text": description | {"training_rows": len(rows[0]), "held_out_rows": len(rows[1])},
        "runs": [],
    }
    results["model"]["parameters"] = sum(p.numel() for p in build(recipe, 0).parameters())
    # A graph that comes out of torch's compile cache is not analysed again: nothing is counted.
    no_cache = torch._inductor.config.patch(fx_graph_cache=False)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        for name in backends:
            for result in train_backend(name, recipe, seeds, rows):
                results["runs"].append(result)
                print(line(result), flush=True)
                if out:
                    out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + train_report.tables(results))
    return results


def build(recipe: Recipe, seed: int) -> nn.Module:
    """The model with the random weights of ``seed``."""
    size = SIZES[recipe.size]
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **size.model, vocab_size=256, max_position_embeddings=size.length, use_cache=False
    )
    with torch.device(recipe.device):
        model = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16) if recipe.params == "bf16" else model


def train_backend(
    name: str, recipe: Recipe, seeds: list[int], rows: tuple[Tensor, Tensor]
) -> Iterator[dict]:
    """The runs of one backend: one model, compiled once, whose weights each seed sets anew."""
    torch._dynamo.reset()
    gc.collect()
    options = BACKENDS[name]
    model = build(recipe, seeds[0])
    function = model if options is None else torch.compile(model, **options)
    known = len(coda_inductor.reports())
    fired: dict[str, dict[str, int]] = {}

    def count(phase: str) -> None:
        fired.setdefault(phase, dict(counters["coda"]))
        counters["coda"].clear()

    counters["coda"].clear()
    for seed in seeds[:1] if name in FIRST_SEED_ONLY else seeds:
        model.load_state_dict(build(recipe, seed).state_dict())
        batches = Batches(rows, SIZES[recipe.size].batch, recipe.device, name == "eager_reversed")
        result = train(model, function, recipe, batches.train(seed, recipe.steps))
        count("fired_training")
        result["eval_loss"] = evaluate(model, function, recipe, batches.held_out())
        count("fired_evaluation")
        sites = Counter(site.how for r in coda_inductor.reports()[known:] for site in r.sites)
        yield {"backend": name, "seed": seed, **result, **fired, "sites": dict(sites)}


def train(
    model: nn.Module, function: Callable[..., Any], recipe: Recipe, batches: Iterator[Tensor]
) -> dict:
    """One run: AdamW, clipped gradients, warm-up and cosine.

    Returns:
        ``"losses"`` (nats a byte, one a step), ``"step_ms"`` (median of the steps after the first
        ``UNTIMED``), ``"tokens_per_s"``, ``"peak_mib"`` of device memory over these steps (None on
        a CPU) and ``"first_step_s"``, which has the compilation in it.
    """
    size, on_gpu = SIZES[recipe.size], recipe.device == "cuda"
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=size.rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=on_gpu,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate)
    losses = torch.zeros(recipe.steps, device=recipe.device)
    untimed = min(UNTIMED, recipe.steps // 2)
    start, first, clock = time.perf_counter(), 0.0, Clock(on_gpu)
    for step, tokens in enumerate(batches):
        with recipe.context():
            loss = function(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()  # stays on the device: reading it would wait for the step
        if step == 0:
            losses[0].item()  # waits
            first = time.perf_counter() - start
        if step == untimed - 1 and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if step >= untimed - 1:
            clock.tick()
    step_ms = statistics.median(clock.laps())
    return {
        "losses": [round(value, 6) for value in losses.tolist()],
        "step_ms": step_ms,
        "tokens_per_s": size.batch * size.length / step_ms * 1e3,
        "peak_mib": torch.cuda.max_memory_allocated() / MIB if on_gpu else None,
        "first_step_s": first,
    }


class Clock:
    """Milliseconds between ticks: of the device where there is one, so that nothing waits."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self.ticks: list[Any] = []

    def tick(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.ticks.append(event)
        else:
            self.ticks.append(time.perf_counter())

    def laps(self) -> list[float]:
        pairs = list(zip(self.ticks, self.ticks[1:], strict=False))
        if not self.on_gpu:
            return [(end - start) * 1e3 for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


@torch.no_grad()
def evaluate(
    model: nn.Module, function: Callable[..., Any], recipe: Recipe, batches: Iterator[Tensor]
) -> float:
    """Mean loss of the batches, nats a byte, through the same compiled model."""
    model.eval()
    losses = []
    for tokens in batches:
        with recipe.context():
            losses.append(function(input_ids=tokens, labels=tokens).loss.float())
    return torch.stack(losses).mean().item()


def line(result: dict) -> str:
    """One run in one line."""
    peak = "" if result["peak_mib"] is None else f"  peak {result['peak_mib']:.0f} MiB"
    return (
        f"{result['backend']:<15} seed {result['seed']}  first step {result['first_step_s']:5.1f} s"
        f"  {result['step_ms']:7.2f} ms a step  loss {result['losses'][0]:.3f} -> "
        f"{result['losses'][-1]:.4f}  eval {result['eval_loss']:.4f}{peak}"
    )


if __name__ == "__main__":
    main()
