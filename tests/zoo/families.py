# SPDX-License-Identifier: Apache-2.0
"""Model families of Hugging Face's, tiny: how each is made and called, and what fires in it.

``FAMILIES`` maps a name to a function from the number of layers to (model, call, inputs):
``call(model, *inputs)`` returns one tensor. ``test_families`` tests some of them;
``tools/model_table.py`` makes the table of ``docs/internals/models.md`` of all.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 128
WIDTHS = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
#: (model, call, inputs)
Family = tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


def _tokens() -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, 16))


def decoder(name: str, **how: Any) -> Callable[[int], Family]:
    """``<name>ForCausalLM`` with ``<name>Config``; ``how`` replaces entries of the config."""

    def make(layers: int) -> Family:
        config = getattr(hf, f"{how.get('config', name)}Config")
        widths = {**WIDTHS, "num_hidden_layers": layers, **how}
        widths = {k: v for k, v in widths.items() if v is not None and k != "config"}
        model = getattr(hf, f"{name}ForCausalLM")(config(**widths))
        return model, lambda model, ids: model(ids, use_cache=False).logits, (_tokens(),)

    return make


def gpt2(layers: int, **how: Any) -> Family:
    widths = {"n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, **how}
    config = hf.GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=1, **widths)
    model = hf.GPT2LMHeadModel(config)
    return model, lambda model, ids: model(ids, use_cache=False).logits, (_tokens(),)


def encoder(model: str, config: str, **how: Any) -> Callable[[int], Family]:
    """A text encoder with a head of its own."""

    def make(layers: int) -> Family:
        widths = {**WIDTHS, "num_hidden_layers": layers, **how}
        made = getattr(hf, model)(getattr(hf, config)(**widths))
        return made, lambda model, ids: model(ids).logits, (_tokens(),)

    return make


def vision(model: str, config: str, **how: Any) -> Callable[[int], Family]:

    def make(layers: int) -> Family:
        names = ("hidden_size", "intermediate_size", "num_attention_heads")
        widths = {name: WIDTHS[name] for name in names} | {"image_size": 32, "patch_size": 8}
        widths |= {"num_hidden_layers": layers, **how}
        made = getattr(hf, model)(getattr(hf, config)(**widths))

        def call(model: nn.Module, image: torch.Tensor) -> torch.Tensor:
            out = model(image)
            return out.logits if "logits" in out else out.last_hidden_state

        return made, call, (torch.randn(2, 3, 32, 32),)

    return make


def t5(layers: int, **how: Any) -> Family:
    widths = {"d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16, "vocab_size": VOCABULARY}
    config = hf.T5Config(num_layers=layers, **widths | how)
    config.decoder_start_token_id = 0

    def call(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits

    return hf.T5ForConditionalGeneration(config), call, (_tokens(),)


FAMILIES: dict[str, Callable[[int], Family]] = {
    "Llama": decoder("Llama", **GROUPED),
    "Qwen2": decoder("Qwen2", **GROUPED),
    "Qwen3": decoder("Qwen3", **GROUPED, head_dim=16),
    "Mistral": decoder("Mistral", **GROUPED),
    "Granite": decoder("Granite", **GROUPED),
    "SmolLM3": decoder("SmolLM3", **GROUPED),
    "Phi-3": decoder("Phi3", **GROUPED),
    "GLM": decoder("Glm", **GROUPED, head_dim=16),
    "Gemma": decoder("Gemma", **GROUPED, head_dim=16),
    "Gemma 2": decoder("Gemma2", **GROUPED, head_dim=16),
    "Gemma 3": decoder("Gemma3", config="Gemma3Text", **GROUPED, head_dim=16),
    "OLMo 2": decoder("Olmo2", **GROUPED),
    "Mixtral": decoder("Mixtral", **GROUPED),
    "Cohere": decoder("Cohere", **GROUPED),
    "StarCoder 2": decoder("Starcoder2", **GROUPED),
    "Nemotron": decoder("Nemotron", **GROUPED),
    "StableLM": decoder("StableLm", **GROUPED),
    "Phi": decoder("Phi", **GROUPED),
    "Falcon": decoder("Falcon", intermediate_size=None),
    "GPT-NeoX": decoder("GPTNeoX"),
    "OPT": decoder("OPT", ffn_dim=128, intermediate_size=None, word_embed_proj_dim=64),
    "GPT-2": gpt2,
    "BERT": encoder("BertForMaskedLM", "BertConfig"),
    "RoBERTa": encoder("RobertaForMaskedLM", "RobertaConfig"),
    "ModernBERT": encoder("ModernBertForMaskedLM", "ModernBertConfig"),
    "ViT": vision("ViTForImageClassification", "ViTConfig"),
    "DINOv2": vision("Dinov2Model", "Dinov2Config", mlp_ratio=2),
    "CLIP vision": vision("CLIPVisionModel", "CLIPVisionConfig"),
    "SigLIP vision": vision("SiglipVisionModel", "SiglipVisionConfig"),
    "T5": t5,
    "Flan-T5": lambda layers: t5(layers, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}
