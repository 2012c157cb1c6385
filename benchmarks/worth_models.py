# SPDX-License-Identifier: Apache-2.0
"""The stock models that ``python -m benchmarks worth`` takes each feature away from: random bf16
weights, called as users call them, so that a causal mask is there only where a user has one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

Step = Callable[[], Any]
WIDTHS: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
}
DOCUMENTS = (1536, 512, 2048, 1024, 1024, 2048)
PADDING = (0, 512, 1024, 256)


class Workload:
    """A model, its batch and how it is compiled.

    Args:
        model: on the GPU, in bf16.
        batch: its keyword arguments.
        training: a step is forward and backward; else forward without gradients.
        blocks: compile each of these modules by itself, in place.
    """

    def __init__(self, model: Any, batch: dict[str, Any], training: bool = True, blocks: Any = ()):
        self.model, self.batch, self.training = model.train(training), batch, training
        self.blocks = list(blocks)

    def step(self, disable: Sequence[str], backend: str = "coda") -> Step:
        """A step under ``backend``; under coda without the features in ``disable``."""
        compiled = functools.partial(torch.compile, backend=backend, dynamic=False)
        options = {"disable": list(disable)} if backend == "coda" else {}
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
        self.model.zero_grad(set_to_none=True)


def llama(size: str, *, layers: int = 4, name: str = "Llama", **more: Any) -> Any:
    """A causal LM of ``transformers`` with Llama's widths."""
    import transformers

    shape = {"num_key_value_heads": 8, "vocab_size": 128256, "num_hidden_layers": layers}
    config = getattr(transformers, f"{name}Config")(**WIDTHS[size] | shape | more)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()


def tokens(model: Any, rows: int = 4, length: int = 2048, labels: bool = True) -> dict[str, Any]:
    """A batch of random tokens."""
    ids = torch.randint(1, model.config.vocab_size, (rows, length), device="cuda")
    return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}


def trained(size: str, **more: Any) -> Workload:
    """Forward and backward, no mask."""
    model = llama(size, **more)
    return Workload(model, tokens(model))


def prefill(size: str, **more: Any) -> Workload:
    """8192 tokens of a prompt, logits of the last one."""
    model = llama(size, **more)
    return Workload(model, tokens(model, labels=False) | {"logits_to_keep": 1}, training=False)


def other(kind: str, rows: int = 4, length: int = 2048, **shape: Any) -> Workload:
    """Any other model of ``transformers`` that takes tokens."""
    import transformers

    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = model_class(model_class.config_class(**shape)).bfloat16()
    return Workload(model, tokens(model, rows, length))


def vit() -> Workload:
    """64 images of 224 x 224 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                       num_attention_heads=16, num_labels=1000)  # fmt: skip
    with torch.device("cuda"):
        model = ViTForImageClassification(config).bfloat16()
        images, labels = torch.randn(64, 3, 224, 224).bfloat16(), torch.randint(1000, (64,))
    return Workload(model, {"pixel_values": images, "labels": labels})


def packed() -> Workload:
    """Documents one behind the other: their positions start again."""
    model = llama("1B")
    batch = tokens(model, 1, sum(DOCUMENTS))
    positions = torch.cat([torch.arange(n, device="cuda") for n in DOCUMENTS])[None]
    return Workload(model, batch | {"position_ids": positions, "use_cache": False})


def padded() -> Workload:
    """Rows of unequal length, padded on the left."""
    model = llama("1B")
    batch = tokens(model, len(PADDING))
    kept = torch.arange(2048, device="cuda") >= torch.tensor(PADDING, device="cuda")[:, None]
    labels = batch["labels"].masked_fill(~kept, -100)
    return Workload(
        model, batch | {"attention_mask": kept.long(), "labels": labels, "use_cache": False}
    )


def window() -> Workload:
    """Mistral's sliding window of 4096 over 8192 tokens."""
    model = llama("8B", name="Mistral", layers=4, vocab_size=32768, sliding_window=4096,
                  max_position_embeddings=32768)  # fmt: skip
    return Workload(model, tokens(model, 1, 8192) | {"use_cache": False})


def float8(recipe: str) -> Workload:
    """Torchao's FP8 training of all linear layers but the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = llama("8B")
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )
    return Workload(model, tokens(model))


def lora() -> Workload:
    """peft, r = 16 on all linear layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(llama("1B"), config).bfloat16()
    return Workload(model, tokens(model))


def fsdp() -> Workload:
    """Blocks under FSDP2 on one rank, each compiled by itself, as torchtitan does."""
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    model = llama("8B", layers=3)
    blocks = list(model.model.layers)
    for module in (*blocks, model):
        fully_shard(module)
    return Workload(model, tokens(model, 2) | {"use_cache": False}, blocks=blocks)


_QWEN3 = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
          "num_hidden_layers": 4,
          "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}  # fmt: skip
_GEMMA3 = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
           "num_hidden_layers": 6,
           "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144}  # fmt: skip
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
         "num_hidden_layers": 8,
         "vocab_size": 30528, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}  # fmt: skip
_GPT2 = {"n_embd": 1280, "n_layer": 6, "n_head": 20, "vocab_size": 50304, "n_positions": 1024,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "1B training": functools.partial(trained, "1B"),
    "8B training": functools.partial(trained, "8B"),
    "1B prefill": functools.partial(prefill, "1B"),
    "8B prefill": functools.partial(prefill, "8B"),
    "Qwen3 1.7B": functools.partial(other, "Qwen3ForCausalLM", **_QWEN3),
    "Gemma 3 1B": functools.partial(other, "Gemma3ForCausalLM", **_GEMMA3),
    "packed": packed,
    "padded": padded,
    "window": window,
    "FP8 rowwise": functools.partial(float8, "rowwise"),
    "FP8 tensorwise": functools.partial(float8, "tensorwise"),
    "LoRA": lora,
    "FSDP2 blocks": fsdp,
    "BERT": functools.partial(other, "BertForMaskedLM", rows=16, length=512, **_BERT),
    "ViT": vit,
    "GPT-2": functools.partial(other, "GPT2LMHeadModel", rows=8, length=1024, **_GPT2),
}
