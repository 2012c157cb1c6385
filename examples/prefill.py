# SPDX-License-Identifier: Apache-2.0
"""Prefill: the logits of the last token of a long prompt.

Usage: python examples/prefill.py [MODEL]

MODEL is a name for ``from_pretrained``; without one it is a Llama with random weights, tiny on a
CPU.
"""

from __future__ import annotations

import itertools
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LENGTH = 8192 if ON_GPU else 64
SIZES = (2048, 8192, 32, 8, 128256, 16) if ON_GPU else (64, 128, 4, 2, 256, 1)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "num_hidden_layers")  # fmt: skip


def main(name: str | None = None) -> None:
    """One forward pass without gradients, then its time."""
    torch.manual_seed(0)
    if name:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        model = LlamaForCausalLM(LlamaConfig(**dict(zip(NAMES, SIZES, strict=True)))).bfloat16()
    model = model.eval().to(DEVICE)
    model.compile(backend="coda")
    prompt = torch.randint(model.config.vocab_size, (1, LENGTH), device=DEVICE)
    with torch.no_grad():
        logits = model(prompt, logits_to_keep=1).logits
        print(f"a prompt of {LENGTH} tokens is followed by token {logits.argmax().item()}")
        if not ON_GPU:
            print("This machine has no GPU: the example runs, and its speed would say nothing.")
            return
        events = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
        for event in events:
            event.record()
            model(prompt, logits_to_keep=1)
        torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    print(f"{times[10]:.1f} ms, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main(*sys.argv[1:2])
