# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model in a loop of your own: AdamW, warm-up and cosine decay,
accumulation, clipping, evaluation, checkpoints that resume.

Usage: python examples/finetune.py [MODEL] [--backend inductor] [--memory 0.5]

MODEL is a name for transformers' ``from_pretrained``; without one it is a Llama with random
weights, as wide as Llama 3.2 1B on a GPU and tiny on a CPU. Replace :func:`batches` by your data.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS, LENGTH = (2, 4096) if ON_GPU else (2, 32)
STEPS, ACCUMULATED, WARM_UP, LEARNING_RATE = (40 if ON_GPU else 4), 4, 2, 1e-4


def llama() -> PreTrainedModel:
    """Random weights in bfloat16."""
    sizes = (2048, 8192, 32, 8, 128256, 16) if ON_GPU else (64, 128, 4, 2, 256, 1)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "num_hidden_layers")  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**dict(zip(names, sizes, strict=True)))).bfloat16()


def batches(words: int) -> Iterator[torch.Tensor]:
    """Tokens of one length for all steps: another length is another graph."""
    while True:
        yield torch.randint(words, (ROWS, LENGTH), device=DEVICE)


def rate(step: int) -> float:
    """The part of the learning rate at a step: a linear warm-up, then a cosine."""
    done = (step - WARM_UP) / max(1, STEPS - WARM_UP)
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * max(0.0, done)))


def main(arguments: list[str] | None = None) -> None:
    """Train, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--backend", default="coda")
    parser.add_argument("--memory", type=float, help="the share of activations that may be kept")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    if chosen.model:
        model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.bfloat16)
    else:
        model = llama()
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=ON_GPU)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if chosen.checkpoint.exists():
        saved = torch.load(chosen.checkpoint, map_location=DEVICE, weights_only=True)
        first = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    options = None if chosen.memory is None else {"memory": chosen.memory}  # of backend="coda"
    model.compile(backend=chosen.backend, options=options)  # parameters keep their names

    data, seconds, losses = batches(model.config.vocab_size), [], []
    for _ in range(first, STEPS):
        began = time.perf_counter()
        for _ in range(ACCUMULATED):
            tokens = next(data)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    model.eval()  # a graph of its own: compiled in its first call
    with torch.no_grad():
        tokens = next(data)
        evaluated = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(states | {"step": STEPS}, chosen.checkpoint)

    if not losses:
        print(f"{chosen.checkpoint} was at step {first} already")
        return
    print(f"{len(losses)} steps under {chosen.backend}, loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
          f"evaluated {evaluated:.3f}, saved {chosen.checkpoint}")  # fmt: skip
    if ON_GPU:
        median = sorted(seconds[len(seconds) // 2 :])[len(seconds) // 4]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{ACCUMULATED * ROWS * LENGTH / median:,.0f} tokens/s, peak {peak:.1f} GiB")
    else:
        print("This machine has no GPU: the example runs, and its speed would say nothing.")


if __name__ == "__main__":
    main()
