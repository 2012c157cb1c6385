# SPDX-License-Identifier: Apache-2.0
"""Train in FP8: torchao converts the linear layers of a model, and coda compiles it.

Usage: python examples/fp8.py [none|rowwise|tensorwise]        (needs torchao)

Compare the last loss with that of ``none``, which trains in bfloat16.
"""

from __future__ import annotations

import sys
import time

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS, LENGTH, STEPS, ACCUMULATED = (2, 4096, 40, 2) if ON_GPU else (2, 32, 3, 2)
# FP8 pays from widths of about 4096 on: this is Llama 3.1 8B with four of its layers.
SIZES = (4096, 14336, 32, 8, 128256, 4) if ON_GPU else (64, 128, 4, 2, 256, 1)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "num_hidden_layers")  # fmt: skip


def main(recipe: str = "rowwise", file: str = "fp8.pt") -> None:
    """Train, and save: the checkpoint is that of the bfloat16 model."""
    torch.manual_seed(0)
    config = LlamaConfig(**dict(zip(NAMES, SIZES, strict=True)), use_cache=False)
    model = LlamaForCausalLM(config).bfloat16().to(DEVICE)
    if recipe != "none":
        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda _, name: name != "lm_head",
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, total_steps=STEPS)
    model.compile(backend="coda")

    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(ACCUMULATED):
            tokens = torch.randint(config.vocab_size, (ROWS, LENGTH), device=DEVICE)
            loss = model(tokens, labels=tokens).loss
            (loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        last = loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    torch.save(model.state_dict(), file)
    print(f"{STEPS} steps, recipe {recipe}, last loss {last:.3f}, saved {file}")
    if ON_GPU:
        median = sorted(seconds[STEPS // 2 :])[STEPS // 4]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{ACCUMULATED * ROWS * LENGTH / median:,.0f} tokens/s, peak {peak:.1f} GiB")
    else:
        print("This machine has no GPU: the example runs, and its speed would say nothing.")


if __name__ == "__main__":
    main(*sys.argv[1:2])
