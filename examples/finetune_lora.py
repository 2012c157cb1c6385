# SPDX-License-Identifier: Apache-2.0
"""Fine-tune with LoRA: peft's adapters on every linear layer, transformers' Trainer with a
schedule, accumulation, and checkpoints.

Usage: python examples/finetune_lora.py [MODEL]        (needs peft and accelerate)

MODEL is a name for ``from_pretrained``; without one it is a Llama with random weights, tiny on a
CPU.
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

ON_GPU = torch.cuda.is_available()
LENGTH, STEPS = (4096, 40) if ON_GPU else (32, 3)
SIZES = (2048, 8192, 32, 8, 128256, 16) if ON_GPU else (64, 128, 4, 2, 256, 1)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "num_hidden_layers")  # fmt: skip


def main(name: str | None = None, folder: str = "adapters") -> None:
    """Train, and save the adapters."""
    torch.manual_seed(0)
    if name:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        model = LlamaForCausalLM(LlamaConfig(**dict(zip(NAMES, SIZES, strict=True)))).bfloat16()
    # peft makes adapters in float32. In the model's dtype, norms are deferred past them too.
    how = LoraConfig(r=16, target_modules="all-linear")
    model = get_peft_model(model, how, autocast_adapter_dtype=False)
    model.compile(backend="coda")
    rows = torch.randint(model.config.vocab_size, (64, LENGTH))
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=2e-4, lr_scheduler_type="cosine", warmup_steps=1, max_grad_norm=1.0,
        save_steps=STEPS, logging_steps=STEPS, report_to=[], use_cpu=not ON_GPU, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])
    done = trainer.train().metrics
    model.save_pretrained(folder)
    print(f"{STEPS} steps, loss {done['train_loss']:.3f}, adapters in {folder}")
    if ON_GPU:
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{done['train_samples_per_second'] * LENGTH:,.0f} tokens/s, the compilation "
              f"in them, peak {peak:.1f} GiB")  # fmt: skip
    else:
        print("This machine has no GPU: the example runs, and its speed would say nothing.")


if __name__ == "__main__":
    main(*sys.argv[1:2])
