# SPDX-License-Identifier: Apache-2.0
"""Pretrain with FSDP2: each block compiled and sharded, head and loss as one graph; AdamW, a
schedule, accumulation without communication, a checkpoint of all ranks.

Usage: torchrun --nproc-per-node GPUS examples/pretrain_fsdp2.py      (python runs one rank)
"""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LENGTH, STEPS, ACCUMULATED = (8192, 40, 2) if ON_GPU else (64, 3, 2)
SIZES = (2048, 8192, 32, 8, 128256, 16) if ON_GPU else (64, 128, 4, 2, 256, 2)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "num_hidden_layers")  # fmt: skip


def main(folder: str = "checkpoint") -> None:
    """Train, and save."""
    if "RANK" not in os.environ:
        one = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(one)
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.manual_seed(0)
    # Without use_cache=False each layer would be a graph of its own.
    config = LlamaConfig(**dict(zip(NAMES, SIZES, strict=True)), use_cache=False)
    model = LlamaForCausalLM(config).bfloat16().to(DEVICE)
    for part in (*model.model.layers, model.model.norm):
        part.compile(backend="coda")
    model.model.forward = torch.compiler.disable(model.model.forward)
    model.compile(backend="coda")
    for part in (*model.model.layers, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, total_steps=STEPS)

    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for part in range(ACCUMULATED):
            model.set_requires_gradient_sync(part + 1 == ACCUMULATED)
            tokens = torch.randint(config.vocab_size, (1, LENGTH), device=DEVICE)
            loss = model(tokens, labels=tokens).loss
            (loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        last = loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    if dist.get_rank() == 0:
        print(
            f"{STEPS} steps, {dist.get_world_size()} rank(s), last loss {last:.3f}, saved {folder}"
        )
        if ON_GPU:
            median = sorted(seconds[STEPS // 2 :])[STEPS // 4]
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"{ACCUMULATED * LENGTH / median:,.0f} tokens/s a rank, peak {peak:.1f} GiB")
        else:
            print("This machine has no GPU: the example runs, and its speed would say nothing.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
