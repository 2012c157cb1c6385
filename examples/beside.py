# SPDX-License-Identifier: Apache-2.0
"""What the examples share: a Llama, real on a GPU and tiny on a CPU, and a step timed twice."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BACKENDS = ("inductor", "coda")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = DEVICE == "cuda"
#: Tokens of a batch; how often a step is timed.
TOKENS, STEPS = (8192, 20) if REAL else (64, 3)
WIDTHS = (2048, 8192, 32, 8, 128256, 16) if REAL else (64, 128, 4, 2, 256, 1)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "num_hidden_layers")  # fmt: skip


def llama() -> LlamaForCausalLM:
    """Stock, in bfloat16 and with random weights; on a GPU as wide as Llama 3.2 1B."""
    torch.manual_seed(0)
    config = LlamaConfig(**dict(zip(NAMES, WIDTHS, strict=True)), use_cache=False)
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).bfloat16()


def tokens(rows: int = 1) -> torch.Tensor:
    """(rows, TOKENS / rows) random tokens."""
    return torch.randint(WIDTHS[4], (rows, TOKENS // rows), device=DEVICE)


def show(name: str, step: Callable[[], object]) -> None:
    """Time ``step``, which is compiled in its first calls, and :func:`report` it."""
    seconds = []
    for i in range(3 + STEPS):
        if i == 3:
            reset_peak()
        start = time.perf_counter()
        step()
        if REAL:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    report(name, seconds[3:])
    torch._dynamo.reset()


def reset_peak() -> None:
    """Forget what compiling needed."""
    if REAL:
        torch.cuda.reset_peak_memory_stats()


def report(name: str, seconds: list[float]) -> None:
    """Print the tokens a second, by the median of steps, and on a GPU the peak of memory."""
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if REAL else ""
    print(f"{name:<28}{TOKENS / statistics.median(seconds):>10,.0f} tokens/s{peak}", flush=True)
