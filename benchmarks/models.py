# SPDX-License-Identifier: Apache-2.0
"""Whole models with a loss, unmodified from ``transformers``, with random bf16 weights.

Random weights make the speed and the rounding real, not what is learnt.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from .measure import device

Batch = dict[str, torch.Tensor]


def _widths(hidden: int, inner: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
            "num_hidden_layers": layers, **more}  # fmt: skip


#: 8B stands for four of its layers, 8B-32 is all of it, with a head of its own.
LLAMAS: dict[str, dict[str, Any]] = {
    "tiny": _widths(64, 128, 4, 1, num_key_value_heads=2, vocab_size=256),
    "1B": _widths(2048, 8192, 32, 16, num_key_value_heads=8, vocab_size=128256),
    "8B": _widths(4096, 14336, 32, 4, num_key_value_heads=8, vocab_size=128256),
    "8B-32": _widths(
        4096, 14336, 32, 32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False
    ),
}
#: Tokens of each document, and of the padding in front of each of four sequences.
DOCUMENTS = (512, 1536, 700, 900, 2100, 300, 1200, 944)
PADDING = (0, 300, 700, 1100)
#: Models whose masks are made of data: class in transformers, its config.
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("LlamaForCausalLM", LLAMAS["1B"] | {"num_hidden_layers": 8}),
    "padded": ("LlamaForCausalLM", LLAMAS["1B"] | {"num_hidden_layers": 8}),
    "window": (
        "MistralForCausalLM",
        _widths(4096, 14336, 32, 4, num_key_value_heads=8, vocab_size=32000, sliding_window=4096),
    ),
}
VIT, IMAGES = _widths(1024, 4096, 16, 24), 64
#: Tokens of a sequence, of models that take less than 2048.
SEQUENCES = {"modernbert": 1024, "gpt2": 1024, "bert": 512, "t5": 512}


def _model(
    kind: str, hidden: int, inner: int, heads: int, layers: int, vocabulary: int, kv: int = 0,
    **more: Any,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """A class in transformers and its config; ``kv``: heads of keys and values, if it has them."""
    grouped = {"num_key_value_heads": kv} if kv else {}
    return kind, _widths(hidden, inner, heads, layers, vocab_size=vocabulary, **grouped, **more)


#: The widths of the model in the comment, and so many of its layers that a step takes some tens of
#: milliseconds: class in transformers, hidden and inner size, heads, layers, vocabulary, kv heads.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": _model("Qwen3ForCausalLM", 2048, 6144, 16, 8, 151936, 8, head_dim=128),  # 1.7B
    "qwen3_4b": _model("Qwen3ForCausalLM", 2560, 9728, 32, 8, 151936, 8, head_dim=128),
    "qwen3_8b": _model("Qwen3ForCausalLM", 4096, 12288, 32, 4, 151936, 8, head_dim=128),
    # all of it
    "qwen3_14b": _model("Qwen3ForCausalLM", 5120, 17408, 40, 40, 151936, 8, head_dim=128),
    "qwen2": _model("Qwen2ForCausalLM", 3584, 18944, 28, 4, 152064, 4),  # 7B
    "qwen2_32b": _model("Qwen2ForCausalLM", 5120, 27648, 40, 64, 152064, 8),  # all of 2.5's
    "gemma2": _model("Gemma2ForCausalLM", 2304, 9216, 8, 8, 256000, 4, head_dim=256),  # 2B
    "gemma3": _model("Gemma3ForCausalLM", 1152, 6912, 4, 12, 262144, 1, head_dim=256),  # 1B
    "phi3": _model("Phi3ForCausalLM", 3072, 8192, 32, 8, 32064, 32, pad_token_id=0),  # mini
    "mistral": _model("MistralForCausalLM", 4096, 14336, 32, 4, 32768, 8),  # 7B
    "granite": _model(  # 3.3 2B
        "GraniteForCausalLM", 2048, 8192, 32, 8, 49152, 8, pad_token_id=0, logits_scaling=8.0,
        attention_multiplier=0.015625, residual_multiplier=0.22, embedding_multiplier=12.0,
    ),
    "olmoe": _model(
        "OlmoeForCausalLM", 2048, 1024, 16, 8, 50304, num_experts=64, num_experts_per_tok=8
    ),
    "qwen3_moe": _model(  # 30B-A3B
        "Qwen3MoeForCausalLM", 2048, 6144, 32, 8, 151936, 4, head_dim=128,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    ),
    "mixtral": _model("MixtralForCausalLM", 4096, 14336, 32, 2, 32000, 8),  # 8x7B
    "olmo2": _model("Olmo2ForCausalLM", 4096, 11008, 32, 4, 100352, 32),  # 7B
    "starcoder2": _model(  # 3B
        "Starcoder2ForCausalLM", 3072, 12288, 24, 6, 49152, 2, embedding_dropout=0.0,
        residual_dropout=0.0,
    ),
    "gptneox": _model("GPTNeoXForCausalLM", 2048, 8192, 16, 8, 50304),  # Pythia 1.4B
    "modernbert": _model(  # large
        "ModernBertForMaskedLM", 1024, 2624, 16, 12, 50368, pad_token_id=0
    ),
    "bert": _model("BertForMaskedLM", 1024, 4096, 16, 12, 30528, hidden_dropout_prob=0.0),  # large
    "t5": (  # v1.1 large; as many layers decode
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_ff": 2816, "num_layers": 8, "num_heads": 16, "vocab_size": 32128,
         "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 1280, "n_layer": 12, "n_head": 20, "vocab_size": 50304, "n_positions": 1024,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
}  # fmt: skip
OTHERS["qwen2-28"] = OTHERS["qwen2"][0], OTHERS["qwen2"][1] | {"num_hidden_layers": 28}


def _llama(size: str, length: int) -> tuple[Any, Batch, dict[str, Any]]:
    """A Llama of shape `size` with positions for `length` tokens, in evaluation mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **{"tie_word_embeddings": True} | LLAMAS[size],
        max_position_embeddings=max(length, 8192),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        tokens = torch.randint(config.vocab_size, (1, length))
    return model, {"input_ids": tokens, "labels": tokens}, {"tokens": length, **LLAMAS[size]}


def _masked(name: str, length: int) -> tuple[Any, Batch, dict[str, Any]]:
    """Documents one behind the other, whose positions begin again; sequences that are padded on the
    left; one that is longer than a window."""
    import transformers

    kind, shape = MASKED[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(
        **shape, tie_word_embeddings=kind == "LlamaForCausalLM", max_position_embeddings=32768
    )
    with torch.device(device()):
        model = model_class(config).bfloat16()
        rows = len(PADDING) if name == "padded" else 1
        tokens = torch.randint(1, shape["vocab_size"], (rows, length // rows))
        batch = {"input_ids": tokens, "labels": tokens}
        if name == "packed":
            starts = torch.cat([torch.arange(n) for n in DOCUMENTS])
            batch["position_ids"] = starts[None, :length]
        if name == "padded":
            kept = torch.arange(length // rows) >= torch.tensor(PADDING)[:, None]
            batch |= {"attention_mask": kept.long(), "labels": tokens.masked_fill(~kept, -100)}
    return model, batch, {"tokens": length, **shape}


def _vit(_size: str, _length: int) -> tuple[Any, Batch, dict[str, Any]]:
    """A batch of 64 images of 224 x 224 pixels: 197 tokens each."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**VIT, num_labels=1000)
    with torch.device(device()):
        model = ViTForImageClassification(config).bfloat16()
        images = torch.randn(IMAGES, 3, 224, 224).bfloat16()
        labels = torch.randint(1000, (IMAGES,))
    return model, {"pixel_values": images, "labels": labels}, {"images": IMAGES, **VIT}


def _other(name: str, length: int) -> tuple[Any, Batch, dict[str, Any]]:
    """As many whole sequences as `length` tokens make."""
    import transformers

    (kind, shape), each = OTHERS[name], SEQUENCES.get(name, 2048)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**shape)
    config.attention_probs_dropout_prob = 0.0
    if hasattr(config, "num_experts_per_tok"):
        config._experts_implementation = "grouped_mm"  # the one that compiles
    with torch.device(device()):
        model = model_class._from_config(config, dtype=torch.bfloat16).bfloat16()
        tokens = torch.randint(shape["vocab_size"], (max(1, length // each), min(length, each)))
    return model, {"input_ids": tokens, "labels": tokens}, {"tokens": length, **shape}


#: Name -> a function of (name, tokens of a step) that gives a model on the device, its batch (with
#: labels) and what to note of its shape.
MODELS: dict[str, Callable[[str, int], tuple[Any, Batch, dict[str, Any]]]] = {
    **dict.fromkeys(LLAMAS, _llama),
    "vit": _vit,
    **dict.fromkeys(MASKED, _masked),
    **dict.fromkeys(OTHERS, _other),
}


def build(name: str, length: int) -> tuple[Any, Batch, dict[str, Any]]:
    """A model in bf16, its batch and its shape; `length` is in tokens, and of no use to "vit"."""
    torch.manual_seed(0)
    return MODELS[name](name, length)


#: Their masks say no more than "causal", which SDPA can be told; of "vit", nothing at all.
CAUSAL = ("tiny", "1B", "8B", "qwen3", "phi3", "mistral", "granite", "olmo2", "starcoder2",
          "gptneox", "vit")  # fmt: skip


def causal(model: Any) -> Any:
    """`model` again, on the same weights, without masks (`make_causal`)."""
    weights = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, weights)
    make_causal(own)
    return own


def make_causal(model: Any) -> None:
    """Give SDPA no mask; the SDPA of a `model` that is causal is told so."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers makes no mask for attention of a name that has no function for masks.
    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    model.set_attn_implementation("sdpa_causal")
