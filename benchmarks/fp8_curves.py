# SPDX-License-Identifier: Apache-2.0
"""A small Llama trained in bfloat16 and in FP8, by torchao and by us: loss by step.

    python -m benchmarks.fp8_curves measure OUT.json [--recipe rowwise]     # on the GPU; a minute
    python -m benchmarks.fp8_curves plot OUT.json OUT.svg                   # anywhere

Float32 weights under bfloat16 autocast, AdamW, a Markov chain of tokens as the data: something that
is learnt in 300 steps and has a known floor, the chain's entropy. Variants share the seed's weights
and batches. What differs is compared with what differs between seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from . import environment, fp8
from .cases import RECIPES
from .measure import device, register

#: Variant -> (backend, its options, whether torchao converts the model). By default a model this
#: small would be left alone: the host is the limit.
VARIANTS: dict[str, tuple[str, dict[str, Any] | None, bool]] = {
    "torch.compile, bf16": ("inductor", None, False),
    "torch.compile, torchao": ("inductor", None, True),
    "coda, torchao": ("coda", {"gate": "always"}, True),
}
COLORS = dict(zip(VARIANTS, ("C0", "C2", "C1"), strict=True))
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
}
BATCH, LENGTH, SUCCESSORS = 8, 512, 8
LEARNING_RATE = 5e-4
MODULE = "benchmarks.fp8_curves"
#: Steps at the end whose mean is a run's final loss.
LAST = 20


def chain(seed: int, vocabulary: int) -> torch.Tensor:
    """(vocabulary, SUCCESSORS): what may follow each token, each as likely."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=generator)


def batches(successors: torch.Tensor, steps: int, seed: int) -> list[torch.Tensor]:
    """`steps` batches of tokens, (BATCH, LENGTH) each, that walk along the chain."""
    generator = torch.Generator().manual_seed(seed)
    count = steps * BATCH
    tokens = torch.empty(count, LENGTH, dtype=torch.long)
    tokens[:, 0] = torch.randint(len(successors), (count,), generator=generator)
    turns = torch.randint(SUCCESSORS, (count, LENGTH), generator=generator)
    for i in range(1, LENGTH):
        tokens[:, i] = successors[tokens[:, i - 1], turns[:, i]]
    return list(tokens.to(device()).split(BATCH))


def train(variant: str, recipe: str, seeds: int, steps: int) -> list[list[float]]:
    """The losses of every step, for each seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    backend, options, eight = VARIANTS[variant]
    register(backend)
    with torch.device(device()):
        model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, use_cache=False))
    weights = list(model.parameters())
    own = fp8.converted(model, recipe, training=True) if eight else model
    compiled = torch.compile(own, backend=backend, options=options)
    found = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in weights:
                # As transformers does: norms begin at one, matrices with a deviation of 0.02.
                weight.copy_(torch.ones_like(weight) if weight.dim() == 1 else
                             0.02 * torch.randn_like(weight))  # fmt: skip
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, fused=device() == "cuda")
        losses = []
        for tokens in batches(chain(seed, SHAPE["vocab_size"]), steps, seed + 1):
            with torch.autocast(device(), torch.bfloat16):
                loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append([round(value, 5) for value in torch.stack(losses).tolist()])
    return found


def final(losses: list[float]) -> float:
    """The mean loss of the last steps."""
    return statistics.mean(losses[-LAST:])


def text(curves: dict[str, list[list[float]]]) -> str:
    """A line a variant: the final loss of each seed, and their mean."""
    lines = []
    for name, seeds in curves.items():
        ends = [final(losses) for losses in seeds]
        each = ", ".join(f"{end:.4f}" for end in ends)
        lines.append(f"{name:<24} {each}; mean {statistics.mean(ends):.4f}")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """All curves, and the entropy that nothing gets below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, seeds in found["curves"].items():
        for i, losses in enumerate(seeds):
            label = None if i else name
            axes.plot(losses, color=COLORS[name], linewidth=0.8, alpha=0.8, label=label)
    axes.axhline(
        math.log(SUCCESSORS), color="black", linewidth=0.8, linestyle="--",
        label="entropy of the data",
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss, nats")
    axes.set_title(f"Llama of {SHAPE['num_hidden_layers']} layers, {found['recipe']}, three seeds")
    axes.legend()
    figure.savefig(path)


def measure(out: Path, recipe: str, seeds: int, steps: int, commit: str | None = None) -> None:
    """Train each variant in a process of its own, side by side; print and write all losses."""
    arguments = ["--recipe", recipe, "--seeds", str(seeds), "--steps", str(steps)]
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", MODULE, "train", name, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=environment.REPOSITORY,
        )
        for name in VARIANTS
    }
    curves = {}
    for name, process in processes.items():
        printed, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{name}: exit status {process.returncode}")
        curves[name] = json.loads(printed.splitlines()[-1])
    print(text(curves))
    about = environment.describe([], commit) | {
        "command": "python -m benchmarks.fp8_curves measure"
    }
    found = {"environment": about, "recipe": recipe, "shape": SHAPE, "curves": curves}
    out.write_text(json.dumps(found) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, training = commands.add_parser("measure"), commands.add_parser("train")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--commit", help="measured commit, where the tree is a copy")
    training.add_argument("variant", choices=VARIANTS, help="one, whose losses are printed")
    for each in (measuring, training):
        each.add_argument("--recipe", choices=RECIPES, default="rowwise")
        each.add_argument("--seeds", type=int, default=3)
        each.add_argument("--steps", type=int, default=300)
    plotting = commands.add_parser("plot")
    plotting.add_argument("results", type=Path)
    plotting.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.command == "plot":
        plot(json.loads(options.results.read_text()), options.picture)
    elif options.command == "train":
        print(json.dumps(train(options.variant, options.recipe, options.seeds, options.steps)))
    else:
        measure(options.out, options.recipe, options.seeds, options.steps, options.commit)


if __name__ == "__main__":
    main()
