# SPDX-License-Identifier: Apache-2.0
"""The stock models that ``python -m benchmarks worth`` takes each feature away from: random bf16
weights, called as users call them, so that a causal mask is there only where a user has one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import models

Step = Callable[[], Any]
#: Of a step or a prompt.
TOKENS = 8192
#: No model here has so many layers.
ALL = 99


class Workload:
    """A model, its batch and how it is compiled.

    Args:
        model: on the GPU, in bf16.
        batch: its keyword arguments.
        training: a step is forward and backward; else forward without gradients.
        blocks: compile each of these modules by itself, in place.
        causal: its masks say no more than "causal".
        options: coda's.
    """

    causal = False
    blocks: Sequence[nn.Module] = ()
    optimizer: torch.optim.Optimizer | None = None
    options: Mapping[str, Any] = {}

    def __init__(self, model: Any, batch: dict[str, Any], training: bool = True):
        self.model, self.batch, self.training = model.train(training), batch, training

    def step(self, disable: Sequence[str], backend: str = "coda") -> Step:
        """A step under ``backend`` ("" for eager); under coda without the features in
        ``disable``."""
        if not backend:
            return functools.partial(self._run, self.model)
        compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
        options = {**self.options, "disable": list(disable)} if backend == "coda" else {}
        if not self.blocks:
            function = compiled(self.model, options=options)
            return functools.partial(self._run, function)
        forwards = [
            compiled(type(block).forward.__get__(block), options=options) for block in self.blocks
        ]

        def run() -> None:
            for block, forward in zip(self.blocks, forwards, strict=True):
                block.forward = forward
            self._run(self.model)

        return run

    def _run(self, function: Callable[..., Any]) -> None:
        if not self.training:
            with torch.no_grad():
                function(**self.batch)
            return
        function(**self.batch).loss.backward()
        if self.optimizer:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)


def stock(name: str, layers: int = 4, training: bool = True, **more: Any) -> Workload:
    """A model of ``models.MODELS`` cut to so many layers, its batch with ``more`` in it; not in
    training a prompt, with logits of the last token."""
    model, batch, _ = models.build(name, TOKENS)
    del blocks(model)[layers:]
    if not training:
        batch.pop("labels")
        more["logits_to_keep"] = 1
    workload = Workload(model, batch | more, training)
    workload.causal = name in models.CAUSAL
    return workload


def blocks(model: nn.Module) -> nn.ModuleList:
    """The layers of a model: its longest list of modules."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def float8(recipe: str, name: str = "8B", layers: int = 4) -> Workload:
    """A stock model in FP8."""
    workload = stock(name, layers)
    workload.model = in_float8(workload.model, recipe)
    return workload


def in_float8(model: nn.Module, recipe: str) -> nn.Module:
    """Torchao's FP8 training of all linear layers but the head. torchao need not be installed: an
    unpacked wheel on PYTHONPATH will do."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    keep = {"module_filter_fn": lambda _, name: name != "lm_head"}
    return convert_to_float8_training(model, config=config, **keep)


def quantized(model: nn.Module, least: int = 512) -> nn.Module:
    """Torchao's dynamic FP8 for inference, scaled by rows, of all linears but the head and
    those narrower than ``least``. By default torchao would have Inductor try blocks for every
    kernel, one compile after another: FLUX did not end in eight minutes."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    def chosen(module: nn.Module, name: str) -> bool:
        wide = isinstance(module, nn.Linear) and min(module.weight.shape) >= least
        return wide and name != "lm_head"

    how = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(model, how, chosen)
    return model


def served(name: str, layers: int) -> Workload:
    """A prompt through a stock model in dynamic FP8."""
    workload = stock(name, layers, training=False)
    quantized(workload.model)
    return workload


def lora(name: str = "1B", layers: int = 4, dropout: float = 0.0, base: str = "lora") -> Workload:
    """LoRA by peft on all linears, in bf16. ``base``: "lora", on weights in bf16; "qlora", in 4
    bits; "lora_fp8", quantized once; "lora_rowwise", in bf16 and cast to FP8 in each step."""
    workload = stock(name, layers)
    if base == "qlora":
        in_four_bits(workload.model)
    elif base == "lora_fp8":
        quantized(workload.model)
    elif base == "lora_rowwise":
        in_float8(workload.model, "rowwise")
    workload.model = adapted(workload.model, dropout)
    for weight in workload.model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.bfloat16()
    workload.model.train(dropout > 0)
    return workload


def adapted(model: nn.Module, dropout: float = 0.1, rank: int = 16) -> Any:
    """``model`` with peft's LoRA on all linears but the head, in float32."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout
    )
    return get_peft_model(model, config)


def in_four_bits(model: nn.Module) -> None:
    """Quantize all linears of ``model`` but its head, as QLoRA does (arXiv 2305.14314)."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    model.is_loaded_in_4bit = True  # peft asks
    for module in list(model.modules()):
        for name, linear in module.named_children():
            if isinstance(linear, nn.Linear) and name != "lm_head":
                weight, sizes = linear.weight.detach(), (linear.in_features, linear.out_features)
                four = Linear4bit(*sizes, False, torch.bfloat16, quant_type="nf4")
                four.weight = Params4bit(weight, False, quant_type="nf4")
                setattr(module, name, four.to(weight.device))


def fsdp() -> Workload:
    """Blocks under FSDP2 on one rank, each compiled by itself, as torchtitan does."""
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    workload = stock("8B", layers=3, use_cache=False)
    workload.blocks, workload.causal = list(blocks(workload.model)), False
    for module in (*workload.blocks, workload.model):
        fully_shard(module)
    return workload


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "1B training": functools.partial(stock, "1B"),
    "8B training": functools.partial(stock, "8B"),
    "1B prefill": functools.partial(stock, "1B", training=False),
    "8B prefill": functools.partial(stock, "8B", training=False),
    "Qwen3 1.7B": functools.partial(stock, "qwen3"),
    "Gemma 3 1B": functools.partial(stock, "gemma3", layers=6),
    **{
        name: functools.partial(stock, name, use_cache=False)
        for name in ("packed", "padded", "window")
    },
    "FP8 rowwise": functools.partial(float8, "rowwise"),
    "FP8 tensorwise": functools.partial(float8, "tensorwise"),
    "LoRA": lora,
    "LoRA 8B": functools.partial(lora, "8B", layers=6, dropout=0.1),
    "FSDP2 blocks": fsdp,
    "BERT": functools.partial(stock, "bert", layers=8),
    "ViT": functools.partial(stock, "vit", layers=8),
    "GPT-2": functools.partial(stock, "gpt2", layers=6),
}
