# SPDX-License-Identifier: Apache-2.0
"""Train on packed documents: several in one row, told apart by ``position_ids`` alone.

transformers makes a mask of them (``use_cache=False``); coda skips the blocks that it hides.

Usage: python examples/packed.py
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LENGTH, STEPS, ACCUMULATED = (8192, 40, 2) if ON_GPU else (64, 3, 2)
SIZES = (2048, 8192, 32, 8, 128256, 16) if ON_GPU else (64, 128, 4, 2, 256, 1)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "num_hidden_layers")  # fmt: skip


def packed(words: int, documents: int = 8) -> dict[str, torch.Tensor]:
    """One row of documents with lengths of chance. No token predicts the first one of the next
    document: its label is ignored."""
    tokens = torch.randint(words, (1, LENGTH), device=DEVICE)
    starts = torch.randperm(LENGTH - 1)[: documents - 1].sort().values + 1
    ends = torch.cat((starts, torch.tensor([LENGTH])))
    lengths = ends.diff(prepend=torch.tensor([0]))
    positions = torch.cat([torch.arange(int(n)) for n in lengths])[None].to(DEVICE)
    labels = tokens.masked_fill(positions == 0, -100)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def main(file: str = "packed.pt") -> None:
    """Train, and save."""
    torch.manual_seed(0)
    config = LlamaConfig(**dict(zip(NAMES, SIZES, strict=True)), use_cache=False)
    model = LlamaForCausalLM(config).bfloat16().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, total_steps=STEPS)
    model.compile(backend="coda")

    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(ACCUMULATED):
            loss = model(**packed(config.vocab_size)).loss
            (loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        last = loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    torch.save(model.state_dict(), file)
    print(f"{STEPS} steps, last loss {last:.3f}, saved {file}")
    if ON_GPU:
        median = sorted(seconds[STEPS // 2 :])[STEPS // 4]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{ACCUMULATED * LENGTH / median:,.0f} tokens/s, peak {peak:.1f} GiB")
    else:
        print("This machine has no GPU: the example runs, and its speed would say nothing.")


if __name__ == "__main__":
    main()
