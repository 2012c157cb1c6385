# SPDX-License-Identifier: Apache-2.0
"""Masks from data in whole models: SDPA beside FlexAttention (docs/attention.md).

    python -m benchmarks.masks OUT.json [NAME...] [--commit C]     # on the GPU; about four minutes

Training steps in bf16 of stock Hugging Face models: ``packed`` (8 layers of 1B widths, 8192 tokens
of eight documents), ``padded`` (the same, 4 x 2048, padding on the left), ``window`` (4 layers of
Mistral, 8192 tokens): under torch.compile, under coda, and under coda without ``block_mask``. The
error is that of all gradients as one vector against a step in float32.

Each name has a process, in which the variants are interleaved.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import environment
from .measure import device, interleaved, peak_mib, register, summary

Step = Callable[[], list[Tensor]]
#: Tokens of each document, and of the padding in front of each sequence.
DOCUMENTS = (512, 1536, 700, 900, 2100, 300, 1200, 944)
PADDING = (0, 300, 700, 1100)
WINDOW = 4096
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL = {"num_hidden_layers": 4, "sliding_window": WINDOW, "max_position_embeddings": 32768}
MODELS = ("packed", "padded", "window")
ROUNDS = 15
#: Variant -> backend and its options.
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "torch.compile": ("inductor", None),
    "coda": ("coda", {}),
    "coda without block_mask": ("coda", {"disable": ["block_mask"]}),
}
#: Of the processes, unless set: the shipped tables choose.
OWN = {"CODA_TUNE": "never"}


def build(name: str, config: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """A model in bf16 and its batch.

    Args:
        name: of ``MODELS``.
        config: replaces some of the model's sizes.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    common = {"use_cache": False, "attn_implementation": "sdpa"}
    with torch.device(device()):
        if name == "window":
            model = MistralForCausalLM(MistralConfig(**MISTRAL | common | (config or {})))
        else:
            model = LlamaForCausalLM(LlamaConfig(**LLAMA | common | (config or {})))
        length = sum(DOCUMENTS)
        sizes = (len(PADDING), length // len(PADDING)) if name == "padded" else (1, length)
        ids = torch.randint(1, model.config.vocab_size, sizes)
        batch = {"input_ids": ids, "labels": ids}
        if name == "packed":
            batch["position_ids"] = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
        if name == "padded":
            kept = torch.arange(sizes[1]) >= torch.tensor(PADDING)[:, None]
            batch |= {"attention_mask": kept.long(), "labels": ids.masked_fill(~kept, -100)}
    return model.bfloat16(), batch


def train(function: Any, model: Any, batch: dict[str, Any]) -> list[Tensor]:
    """The loss and all gradients of a step."""
    model.zero_grad(set_to_none=True)
    loss = function(**batch).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def of_model(name: str) -> tuple[dict[str, Step], Callable[[], dict[str, Any]]]:
    """The steps of a model, and what gives their losses and errors."""
    model, batch = build(name)
    steps = {}
    for variant, (backend, options) in VARIANTS.items():
        register(backend)
        function = torch.compile(model, backend=backend, options=options)
        steps[variant] = functools.partial(train, function, model, batch)

    def checked() -> dict[str, Any]:
        found = {variant: [t.cpu() for t in step()] for variant, step in steps.items()}
        own = {key: t.clone() for key, t in model.state_dict().items()}
        model.float()
        exact = [t.cpu() for t in train(model, model, batch)]
        model.bfloat16().load_state_dict(own)
        return {variant: compared(values, exact) for variant, values in found.items()}

    return steps, checked


def compared(values: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """The loss, and how far the gradients are off."""
    off = size = 0.0
    for value, true in zip(values[1:], exact[1:], strict=True):
        there = true.to(device())
        off += (value.to(device()).float() - there).square().sum().item()
        size += there.square().sum().item()
    return {
        "loss": values[0].item(),
        "exact_loss": exact[0].item(),
        "gradient_error": (off / size) ** 0.5,
    }


def part(name: str, rounds: int) -> None:
    """Compile and measure what ``name`` says, and print the result as JSON."""
    from torch._dynamo.utils import counters

    steps, checked = of_model(name)
    counts = {}
    for variant, step in steps.items():
        counters["coda"].clear()
        step()
        counts[variant] = dict(counters["coda"])
    found: dict[str, Any] = {variant: {} for variant in steps}
    for variant, values in interleaved(steps, rounds).items():
        times = summary(values)
        found[variant] |= {key: round(times[key], 3) for key in ("median_ms", "p20_ms", "p80_ms")}
        found[variant] |= {"peak_mib": peak_mib(steps[variant]), "counters": counts[variant]}
    for variant, errors in checked().items():
        found[variant] |= errors
    print(json.dumps(found), flush=True)


def measured(names: list[str], rounds: int = ROUNDS) -> dict[str, Any]:
    """{name: {variant: figures}}, each name in a process of its own; one that ends without a
    result says so in its place."""
    # A module, no script: transformers looks for a package "kernels", and this folder has one file.
    command = [sys.executable, "-m", "benchmarks.masks", "--part"]
    found: dict[str, Any] = {}
    for name in names:
        done = subprocess.run(
            [*command, name, str(rounds)], stdout=subprocess.PIPE, text=True, check=False,
            env=OWN | os.environ, cwd=environment.REPOSITORY,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        failed = {"failed": f"exit status {done.returncode}"}
        found[name] = failed if done.returncode or not lines else json.loads(lines[-1])
        print(name, json.dumps(found[name]), flush=True)
    return found


def main(arguments: list[str]) -> None:
    """Measure the names given, or all, and write the results; or be the process of one."""
    if arguments[:1] == ["--part"]:
        part(arguments[1], int(arguments[2]))
        return
    every = MODELS
    parser = argparse.ArgumentParser("python -m benchmarks.masks")
    parser.add_argument("out", type=Path, help="file for the results, JSON")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(every)} (default: all)")
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(every)}")
    start = time.monotonic()
    found = measured(options.names or list(every))
    given = [options.out.name, *options.names]
    about = environment.describe(given, options.commit, "benchmarks.masks")
    about["seconds"] = round(time.monotonic() - start)
    text = json.dumps({"environment": about, "results": found}, indent=1)
    options.out.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
