# SPDX-License-Identifier: Apache-2.0
"""Suite `families`: whole, unmodified models of ``transformers``, a forward pass and a training
step of each.

Random bf16 weights, HF's own loss, no optimizer; the variants share one model. The step of
the Llama 1B is also taken in eager and with Liger's kernels. Models whose masks are made of data
(packed and padded sequences, a window; docs/attention.md) take a step only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from . import models
from .cases import FORWARD, TRAINING, Case, Way
from .measure import Call

TOKENS = 8192
#: Key of :data:`benchmarks.models.MODELS` -> what its widths are those of.
FAMILIES = {
    "1B": "Llama 1B",
    "qwen3": "Qwen3 1.7B",
    "gemma2": "Gemma 2 2B",
    "gemma3": "Gemma 3 1B",
    "phi3": "Phi-3 mini",
    "mistral": "Mistral 7B",
    "granite": "Granite 3.3 2B",
    "olmo2": "OLMo 2 7B",
    "starcoder2": "StarCoder 2 3B",
    "gptneox": "Pythia 1.4B (GPT-NeoX)",
    "modernbert": "ModernBERT large",
    "gpt2": "GPT-2",
    "bert": "BERT large",
    "t5": "T5 large",
    "vit": "ViT-L",
}
#: Their masks say no more than "causal", which SDPA can be told.
CAUSAL = (
    *("tiny", "1B", "8B", "qwen3", "phi3", "mistral", "granite", "olmo2", "starcoder2", "gptneox"),
)


def every() -> list[Case]:
    """The cases of the suite."""
    cases = [Case(name, TOKENS, mode) for name in FAMILIES for mode in (FORWARD, TRAINING)]
    return cases + [Case(name, TOKENS, TRAINING) for name in models.MASKED]


def variants(case: Case) -> tuple[str, ...]:
    """The variants that a case has, of :func:`benchmarks.cases.ways`."""
    causal = ("compile_causal",) if case.size in CAUSAL else ()
    if case.size in models.MASKED or case.size == "vit":
        causal = ("eager", "compile_flex")
    liger = case.size in ("tiny", "1B") and case.training
    beside = ("eager", "liger", "liger_compile") if liger else ()
    return (*beside, "compile", "coda", *causal, "max_autotune", "coda_options")


class Model:
    """The model of one case with its batch: made once, used by all variants.

    A forward pass gives the logits, a language model's of the last position only. Raises KeyError
    where its size is no key of :data:`benchmarks.models.MODELS`.
    """

    def __init__(self, case: Case):
        self.training = case.training
        self.model, batch, self.shape = models.build(case.size, case.rows)
        self.model.train(self.training)
        config, takes = self.model.config, inspect.signature(self.model.forward).parameters
        self.batch: dict[str, Any] = dict(batch)
        if hasattr(config, "use_cache"):
            self.batch["use_cache"] = False
        if not self.training:
            labels = self.batch.pop("labels")
            if config.is_encoder_decoder:
                self.batch["decoder_input_ids"] = labels
            if "logits_to_keep" in takes:
                self.batch["logits_to_keep"] = 1

    def compiled(self, way: Way) -> Call:
        """The forward pass, or the step, compiled that way when first called. It returns a list of
        tensors: the logits, or the gradients of all parameters, of which the model keeps none.
        """
        model = again(self.model) if way.attention else self.model
        if way.attention == "causal":
            make_causal(model)
        elif way.attention:
            model.set_attn_implementation("flex_attention")
        around: Any = contextlib.nullcontext
        if way.liger:
            model = again(model)
            around = models.liger(model)
        function = way.compile(model)
        if self.training:
            return functools.partial(self._step, function, list(model.parameters()), around)
        return lambda: [function(**self.batch).logits]

    def _step(
        self, function: Any, weights: list[torch.Tensor], around: Any = contextlib.nullcontext
    ) -> list[torch.Tensor]:
        with around():
            function(**self.batch).loss.backward()
        found = [weight.grad for weight in weights if weight.grad is not None]
        for weight in weights:
            weight.grad = None
        return found

    def exact(self) -> dict[str, torch.Tensor]:
        """The logits, or each parameter's gradient, by name, in eager with everything in fp32."""
        wide = copy.deepcopy(self.model).float()
        batch = {n: t.float() if _floating(t) else t for n, t in self.batch.items()}
        if not self.training:
            return {"logits": wide(**batch).logits}
        wide.gradient_checkpointing_enable({"use_reentrant": False})  # changes no value
        wide(**batch).loss.backward()
        return {n: weight.grad for n, weight in wide.named_parameters() if weight.grad is not None}

    def errors(self, calls: dict[str, Call]) -> dict[str, dict[str, float]]:
        """Relative error of the logits, or of all gradients as one vector, in each call."""
        truths = list(self.exact().values())
        return {name: {"all": self.difference(call(), truths)} for name, call in calls.items()}

    def difference(self, values: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]) -> float:
        """The relative difference of all `values`, as one vector, from `truths`."""
        pairs = list(zip(values, truths, strict=True))
        off = sum((value.float() - truth.float()).square().sum() for value, truth in pairs)
        return (off / sum(truth.float().square().sum() for _, truth in pairs)).sqrt().item()


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def again(model: Any) -> Any:
    """`model` once more, on the same weights."""
    kept = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)


def causal(model: Any) -> Any:
    """`model` again, on the same weights, with SDPA told to be causal where it was given a mask."""
    own = again(model)
    make_causal(own)
    return own


def make_causal(model: Any) -> None:
    """Tell the SDPA of `model` to be causal where it was given a mask."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers makes no mask for attention of a name that has no function for masks.
    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    model.set_attn_implementation("sdpa_causal")
