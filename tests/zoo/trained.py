# SPDX-License-Identifier: Apache-2.0
"""A small Llama and transformers' Trainer of it, the same each time."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS, LAYERS = 3, 1


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def trainer(model, callbacks=(), **how):
    rows = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    common = {"max_steps": STEPS, "report_to": "none", "use_cpu": True, "logging_steps": 1}
    size = {"per_device_train_batch_size": 2, "save_strategy": "no", "learning_rate": 1e-2}
    folder = tempfile.gettempdir()  # nothing is saved
    arguments = TrainingArguments(folder, **common, **size, **how)
    return Trainer(model, arguments, train_dataset=data, callbacks=[*callbacks])


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
