# SPDX-License-Identifier: Apache-2.0
"""Masks from data: whole models and attention alone, SDPA beside FlexAttention (docs/attention.md).

    python -m benchmarks.masks OUT.json [NAME...] [--commit C]     # on the GPU; about four minutes

Training steps in bf16 of stock Hugging Face models: ``packed`` (8 layers of 1B widths, 8192 tokens
of eight documents), ``padded`` (the same, 4 x 2048, padding on the left), ``window`` (4 layers of
Mistral, 8192 tokens): under torch.compile, under coda, and under coda without ``block_mask``. The
error is that of all gradients as one vector against a step in float32. ``attention_...`` is one
call, forward and backward, also of causal attention without a mask.

Each name has a process. All compile at once; then one after the other measures, alone, its
variants interleaved.
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
import torch.nn.functional as F
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
#: Name -> sequences, tokens of each, width of heads; 32 heads, 8 of keys and values.
ATTENTION = {
    "attention_packed": (1, 8192, 64),
    "attention_padded": (4, 2048, 64),
    "attention_window": (1, 8192, 128),
    "attention_small": (1, 1024, 64),
}
MODELS = ("packed", "padded", "window")
HEADS, GROUPS = 32, 8
ROUNDS = 15
#: Variant -> backend and its options.
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "torch.compile": ("inductor", None),
    "coda": ("coda", {}),
    "coda without block_mask": ("coda", {"disable": ["block_mask"]}),
}
#: So long a process may measure.
PATIENCE_S = 120
#: Of the processes, unless set: they share one machine, on which nothing can be tuned meanwhile.
OWN = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4", "CODA_TUNE": "never"}


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


def shown(name: str, length: int) -> Tensor:
    """What a batch's data say: the document of each token, or which tokens are none of padding."""
    if name == "attention_padded":
        return torch.arange(length) >= torch.tensor(PADDING)[:, None]
    ends = torch.tensor(DOCUMENTS).cumsum(0) * length // sum(DOCUMENTS)
    return (torch.arange(length)[:, None] >= ends).sum(1)[None]


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
    """SDPA beside the mask that ``data`` make, keys and values repeated for their queries."""
    length = q.shape[2]
    i = torch.arange(length, device=q.device)
    mask = (i <= i[:, None])[None, None]
    if name == "attention_padded":
        mask = mask & data[:, None, None, :]
    elif name == "attention_window":
        mask = mask & (i > i[:, None] - WINDOW)
    else:
        mask = mask & (data[:, None, :, None] == data[:, None, None, :])
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def of_attention(name: str) -> tuple[dict[str, Step], Callable[[], dict[str, Any]]]:
    """The calls of attention alone; nothing is checked."""
    batch, length, width = ATTENTION[name]
    torch.manual_seed(0)

    def made(heads: int) -> Tensor:
        shape = batch, length, heads, width
        return torch.randn(shape, device=device(), dtype=torch.bfloat16).transpose(1, 2)

    tensors = [made(n).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    data, gradient = shown(name, length).to(device()), made(HEADS)
    # Alone it is below the gate, which asks for the work of several layers.
    ways = VARIANTS | {"coda": ("coda", {"gate": "always", "strict": True})}
    ways.pop("coda without block_mask")

    def step(function: Any, *more: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(function(*tensors, *more), tensors, gradient))

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    steps: dict[str, Step] = {}
    for variant, (backend, options) in ways.items():
        register(backend)
        function = torch.compile(
            functools.partial(attend, name), backend=backend, options=options, dynamic=False
        )
        steps[variant] = functools.partial(step, function, data)
    steps["torch.compile, causal, no mask"] = functools.partial(step, torch.compile(causal))
    return steps, dict


def part(name: str, rounds: int) -> None:
    """Compile what ``name`` says, print a line, wait for one, measure, print the result as JSON."""
    from torch._dynamo.utils import counters

    steps, checked = (of_model if name in MODELS else of_attention)(name)
    counts = {}
    for variant, step in steps.items():
        counters["coda"].clear()
        step()
        counts[variant] = dict(counters["coda"])
    if device() == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print("ready", flush=True)
    sys.stdin.readline()
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
    workers = {
        name: subprocess.Popen(
            [*command, name, str(rounds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=OWN | os.environ, cwd=environment.REPOSITORY,
        )
        for name in names
    }  # fmt: skip
    found: dict[str, Any] = {}
    try:
        for name, worker in workers.items():
            assert worker.stdout is not None, "it was asked for"
            if worker.stdout.readline().strip() != "ready":
                found[name] = {"failed": f"exit status {worker.wait()}, while compiling"}
        for name, worker in workers.items():
            if name not in found:
                out, _ = worker.communicate("go\n", timeout=PATIENCE_S)
                lines = out.splitlines()
                failed = {"failed": f"exit status {worker.returncode}, while measuring"}
                found[name] = failed if worker.returncode or not lines else json.loads(lines[-1])
            print(name, json.dumps(found[name]), flush=True)
    finally:
        for worker in workers.values():
            worker.kill()
    return {name: found[name] for name in names}


def main(arguments: list[str]) -> None:
    """Measure the names given, or all, and write the results; or be the process of one."""
    if arguments[:1] == ["--part"]:
        part(arguments[1], int(arguments[2]))
        return
    every = (*MODELS, *ATTENTION)
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
