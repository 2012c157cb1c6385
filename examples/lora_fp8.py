# SPDX-License-Identifier: Apache-2.0
"""LoRA on weights that are quantized to FP8 once (needs transformers, peft and torchao).

    python examples/lora_fp8.py

Tiny on a CPU, with the widths of Llama 3.1 8B, cut to four layers, on a GPU. The head and the
embedding stay in bfloat16, and so do the adapters, which alone are trained and saved.
"""

import time
from typing import Any

import peft
import torch
from torch import nn
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quant_api
from transformers import LlamaConfig, LlamaForCausalLM

import coda_inductor


def build(gpu: bool) -> Any:
    """A Llama with frozen FP8 weights and bfloat16 adapters. Quantize before peft wraps layers."""
    hidden, mlp, heads, layers, vocab = (
        (4096, 14336, 32, 4, 128256) if gpu else (64, 128, 4, 1, 512)
    )
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads, vocab_size=vocab,
        num_key_value_heads=heads // 4, num_hidden_layers=layers, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda" if gpu else "cpu"):
        model = LlamaForCausalLM(config).bfloat16()
    how = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    if not gpu:  # torchao asks for a GPU, which its CPU kernels do without
        quant_api._check_hardware_support = lambda _: None
    quant_api.quantize_(model, how, lambda m, name: isinstance(m, nn.Linear) and name != "lm_head")
    adapters = peft.LoraConfig(
        r=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)


def main() -> None:
    """Train a few steps on one batch, and save the adapters."""
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    model = build(gpu).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    for weight in weights:
        weight.data = weight.data.bfloat16()
    model.compile(backend="coda")
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    rows, length, steps = (2, 4096, 10) if gpu else (2, 64, 3)
    ids = torch.randint(0, 512, (rows, length), device=weights[0].device)
    for step in range(steps):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took = f"{1e3 * (time.perf_counter() - start):.0f} ms" if gpu and step else ""
        print(f"step {step}: loss {loss.item():.3f} {took}")
    print(coda_inductor.reports()[-1].summary)
    if gpu:
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    else:
        print("no GPU: no speed")
    model.save_pretrained("adapters")


if __name__ == "__main__":
    main()
