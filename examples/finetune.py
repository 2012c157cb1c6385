# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model in a loop of your own: AdamW, warm-up and cosine decay,
accumulation, clipping, evaluation, checkpoints that resume.

Usage: python examples/finetune.py [MODEL] [--backend inductor] [--memory 0.5] [--lora]
       [--fp8 rowwise] [--packed]

MODEL is a name for transformers' ``from_pretrained``; without one it is a Llama with random
weights: tiny on a CPU, and on a GPU as wide as Llama 3.2 1B, or with ``--fp8``, which needs torchao
and pays at such widths, four layers of Llama 3.1 8B. ``--lora`` trains peft's adapters on all
linear layers. ``--packed`` puts several documents in a row;
transformers makes a mask of their positions, and coda skips the blocks that it hides. Replace
:func:`batches` by your data.
"""

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
DOCUMENTS = 8


def llama(wide: bool) -> PreTrainedModel:
    """Random weights in bfloat16."""
    sizes = (4096, 14336, 32, 8, 128256, 4) if wide else (2048, 8192, 32, 8, 128256, 16)
    sizes = sizes if ON_GPU else (64, 128, 4, 2, 256, 1)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "num_hidden_layers")  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**dict(zip(names, sizes, strict=True)))).bfloat16()


def batches(words: int, packed: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Tokens of one length for all steps: another length is another graph. No token predicts the
    first one of the next document in a row: its label is ignored."""
    while True:
        tokens = torch.randint(words, (ROWS, LENGTH), device=DEVICE)
        batch = {"input_ids": tokens, "labels": tokens}
        if packed:
            starts = torch.randperm(LENGTH - 1)[: DOCUMENTS - 1].sort().values + 1
            lengths = torch.tensor([0, *starts, LENGTH]).diff()
            row = torch.cat([torch.arange(int(n)) for n in lengths])
            positions = row.expand(ROWS, -1).to(DEVICE)
            labels = tokens.masked_fill(positions == 0, -100)
            batch |= {"position_ids": positions, "labels": labels}
        yield batch


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
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fp8", metavar="RECIPE", help="rowwise or tensorwise, of torchao's")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    if chosen.model:
        model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.bfloat16)
    else:
        model = llama(wide=bool(chosen.fp8))
    model = model.to(DEVICE).train()
    if chosen.fp8:  # parameters keep their dtype: the checkpoint is that of the bfloat16 model
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(chosen.fp8)
        keep = {"module_filter_fn": lambda _, name: name != "lm_head"}
        convert_to_float8_training(model, config=config, **keep)
    if chosen.lora:
        from peft import LoraConfig, get_peft_model

        # peft makes adapters in float32. In the model's dtype, norms are deferred past them too.
        how = LoraConfig(r=16, target_modules="all-linear")
        model = get_peft_model(model, how, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=ON_GPU)
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

    data, seconds, losses = batches(model.config.vocab_size, chosen.packed), [], []
    for _ in range(first, STEPS):
        began = time.perf_counter()
        for _ in range(ACCUMULATED):
            loss = model(**next(data), use_cache=False).loss
            (loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    model.eval()  # a graph of its own: compiled in its first call
    with torch.no_grad():
        evaluated = model(**next(data), use_cache=False).loss.item()
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
