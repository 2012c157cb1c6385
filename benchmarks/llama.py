# SPDX-License-Identifier: Apache-2.0
"""Suite `llama`: prefill of a whole, unmodified ``transformers.LlamaForCausalLM`` with random bf16
weights.

Batch 1, no cache, no gradients, logits of the last position. Random weights make the speed and the
rounding real, not the text.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters

from .measure import Call, Variants, device, register, relative_error

if TYPE_CHECKING:
    from .runner import Job

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
ACCURACY_SAMPLES = 4


def build(size: str, length: int, shape: dict[str, Any] | None = None):
    """A model of shape `size` (or `shape`) in bf16, in evaluation mode, and a function that draws
    token ids.

    The function gives (1, length) int64 ids, other ones at every call. Length is in tokens.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        **(shape or SHAPES[size]),
        tie_word_embeddings=True,
        max_position_embeddings=max(length, 8192),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def tokens() -> torch.Tensor:
        return torch.randint(config.vocab_size, (1, length), device=device())

    return model, tokens


def logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last position, (1, 1, vocabulary)."""
    return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits


def _accuracy(model, models: dict, draw) -> dict:
    """Relative error of the last logits over several random prompts, against eager fp32 of the same
    weights.
    """
    exact = copy.deepcopy(model).float()
    prompts = [draw() for _ in range(ACCURACY_SAMPLES)]
    truth = torch.cat([logits(exact, prompt) for prompt in prompts])
    return {
        name: {
            "logits": relative_error(torch.cat([logits(own, prompt) for prompt in prompts]), truth)
        }
        for name, own in models.items()
    }


@torch.no_grad()
def run(job: Job, variants: Variants) -> dict:
    """Measure one sequence length (`job.length` tokens); see :mod:`benchmarks.runner` for the
    fields of `job`.

    Returns:
        what :meth:`Variants.measure` does, with ``"shape"``, ``"profile"``, ``"graph_breaks"`` and
        ``"accuracy": {variant: {"logits": error}}``.
    """
    model, draw = build(job.size, job.length)
    tokens = draw()
    models = {"eager": model}

    def compiled(name: str, backend: str) -> Call:
        register(backend)
        models[name] = torch.compile(copy.deepcopy(model), backend=backend)
        return lambda: logits(models[name], tokens)

    variants.add("eager", lambda: lambda: logits(model, tokens))
    variants.add("compile", lambda: compiled("compile", "inductor"))
    variants.add("coda", lambda: compiled("coda", job.backend))
    variants.add_graphs(("compile", "coda"))
    result = variants.measure(job.rounds)
    result["shape"] = {"tokens": job.length, **SHAPES[job.size]}
    result["profile"] = variants.profile(("coda", "compile"))
    result["graph_breaks"] = sum(counters["graph_break"].values())
    working = {name: own for name, own in models.items() if name in variants.calls}
    accuracy = variants.attempt("accuracy", lambda: _accuracy(model, working, draw))
    result["accuracy"] = accuracy or {}
    return result
