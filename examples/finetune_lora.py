# SPDX-License-Identifier: Apache-2.0
"""Fine-tune with LoRA: peft's adapters on every linear layer, transformers' Trainer.

Usage: python examples/finetune_lora.py        (needs peft and accelerate)
"""

from __future__ import annotations

import itertools
import tempfile
import time

import torch
from beside import BACKENDS, REAL, STEPS, llama, report, reset_peak, tokens
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments


class Ended(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_, **__) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 4:
            reset_peak()


def main(rank: int = 16) -> None:
    """Train under each backend; what Trainer does between steps is in the time."""
    rows = [{"input_ids": row, "labels": row} for row in tokens().cpu().repeat(4 + STEPS, 1)]
    for backend in BACKENDS:
        model = get_peft_model(llama(), LoraConfig(r=rank, target_modules="all-linear"))
        ended = Ended()
        with tempfile.TemporaryDirectory() as folder:
            how = TrainingArguments(
                folder, max_steps=len(rows), per_device_train_batch_size=1, report_to=[],
                logging_strategy="no", save_strategy="no", use_cpu=not REAL, disable_tqdm=True,
            )  # fmt: skip
            model.compile(backend=backend)
            Trainer(model, how, train_dataset=rows, callbacks=[ended]).train()
        report(backend, [end - start for start, end in itertools.pairwise(ended.times[3:])])
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
