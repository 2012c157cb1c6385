# SPDX-License-Identifier: Apache-2.0
"""What is shown of each suite, in order: a title, what a reader must know, and its tables."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import fp8_tables, grid_tables, tables, train_tables
from .kernels import STEP

if TYPE_CHECKING:
    from collections.abc import Callable

LAYER_NOTES = """\
The non-attention part of one Llama layer, forward under `torch.no_grad()`, bf16, {M} rows:
separate q/k/v and gate/up `nn.Linear` and a norm module ({norm}). *speedup* is the time of the
better of the two torch.compile columns over coda's. The GEMM columns are cuBLAS products of the
same shapes and nothing else. *hand-composed* is written directly in QuACK epilogues; it reads gate
and up interleaved from one weight and q, k, v from one weight, which a module with separate
parameters does not offer, and it also stores the pre-activations that training needs."""

LAYER_TRAIN_NOTES = """\
The same layer, forward and backward: gradients of both inputs and of all parameters, for given
gradients of x2, q, k and v. *speedup* is the time of the better of the two torch.compile columns
over coda's. *hand-composed* also gets the gradients of q, k and v in one tensor. Errors are those
of the gradients."""

LLAMA_NOTES = """\
`transformers.LlamaForCausalLM`, unmodified, {num_hidden_layers} layers of width {hidden_size}, MLP
{intermediate_size}, {num_attention_heads} heads, {num_key_value_heads} key-value heads, vocabulary
{vocab_size}, random bf16 weights: prefill of one prompt without a cache, logits of the last
position. Attention is the same code in both compiled columns. Peak memory is what one call needs
beyond weights and inputs."""

LLAMA_TRAIN_NOTES = """\
Models of `transformers`, unmodified, bf16: forward with HF's loss and backward, optimizer in the
step: {optimizer}. *1B* is `LlamaForCausalLM` with 16 layers of width 2048 and a vocabulary of
128256 that the LM head shares, *8B* four of its layers of width 4096, both on one sequence;
*gpt2* is `GPT2LMHeadModel`, 12 layers of width 1280 and sequences of 1024; *vit*
`ViTForImageClassification`, 24 layers of width 1024 and 64 images, whatever the number of tokens
says; the others have the widths of Qwen3-1.7B, Gemma 2 2B, Phi-3 mini (8 layers, sequences of
2048), BERT large (12 layers) and T5 v1.1 large (8 and 8 layers, sequences of 512).
*checkpointing* is HF's own, not re-entrant. Peak memory counts the gradients; *the model* is
parameters and optimizer state. Errors are those of all gradients as one vector, and of the
parameter where a variant is worst. A key projection's bias is never that: it has no gradient but
rounding, and no error to compare.
"""

GRID_NOTES = """\
The same layer at more widths and rows M, bf16 and fp16: *width-M-mode-dtype*, *forward* under
`torch.no_grad()`, *training* with the gradients of inputs and parameters. 13B has as many key and
value heads as query heads. The variants share their weights. *speedup* is the time of the better
torch.compile over ours; beside it its 20th and 80th percentile, round by round, and how many of the
GEMMs are fused. *J*: joules of one step, by the driver's counter of energy, while the step repeats
without a pause."""

FAMILIES_NOTES = """\
Models of `transformers`, unmodified, random bf16 weights: *model-tokens-mode-dtype*. *1B* is
`LlamaForCausalLM` with 16 layers of width 2048, the others have the widths of Qwen3 1.7B, Gemma 2
2B, Phi-3 mini, Granite 3.3 2B, Pythia 1.4B (8 layers each, sequences of 2048), Mistral 7B and OLMo
2 7B (4 layers), StarCoder 2 3B (6), Gemma 3 1B (12), GPT-2 large and ModernBERT large (12 layers,
sequences of 1024), BERT large (12 layers) and T5 v1.1 large (8 and 8 layers, sequences of 512) and
ViT-L (24 layers and 64 images, whatever the number of tokens says). *forward*: logits (a language
model's of the last position) under `torch.no_grad()`; *training*: forward with HF's loss, and
backward. *is_causal*: HF hands SDPA a mask of constants; this is torch.compile of the model with
that mask left out and SDPA told to be causal, which coda finds by itself. *error*: of the logits,
or of all gradients as one vector, against fp32. Other columns as in the grid of layers."""

FP8_NOTES = """\
FP8 by torchao's recipes, bf16 weights; a case is *what:widths-rows-mode-dtype*. *layer* is the
layer above, *llama* a `LlamaForCausalLM` of those widths, whose masks are left out in every
variant, so that SDPA is causal in all. *training*: forward and backward, no optimizer; *forward*:
under `torch.no_grad()`, quantized by `Float8DynamicActivationFloat8WeightConfig`. torchao converts
every linear layer but the LM head. Errors are those of the gradients (*forward*: of the outputs)
against fp32. *error* is the largest ratio, of all tensors, of ours over that of torchao under
torch.compile."""

KERNELS_NOTES = """\
One piece of a layer at a time, bf16, {M} rows, with its GEMMs: *GEMM, residual, RMSNorm* is
x = residual + o_proj(y) (d to d) and norm(x), both returned, or with another d to d product of
norm(x) in its place; *RMSNorm, 2 GEMMs, SwiGLU* is silu(gate(norm(x))) * up(norm(x)) (d to f);
*SwiGLU, GEMM* is down(silu(gate) * up) (f to d).
Everything requires gradients. Device time: the queue is filled before each round. *speedup* is over
torch.compile; Liger's columns are its kernels between eager GEMMs."""

COMPILE_NOTES = "Seconds to the first result in a new process; cold: with empty compile caches."


@dataclasses.dataclass(frozen=True)
class Section:
    """One suite's part of the page.

    Attributes:
        suite: key of the results.
        title: heading.
        notes: text, formatted with the shape of the suite's first part.
        tables: caption ("" for none) and function of (results, form), in order.
    """

    suite: str
    title: str
    notes: str
    tables: tuple[tuple[str, Callable[..., str]], ...]

    def text(self, results: dict) -> str:
        """The notes for what was measured."""
        shapes = (result["shape"] for _, result in tables.complete(results, self.suite))
        shape = dict(next(shapes, {}))
        if "norm" in shape:
            shape["norm"] = "HF's spelling of RMSNorm" if shape["norm"] == "hf" else "`nn.RMSNorm`"
        if "optimizer" in shape:
            shape["optimizer"] = shape["optimizer"] or "none"
        return self.notes.format(**shape)

    def shown(self, results: dict) -> bool:
        """Whether there is anything to show."""
        if self.suite == "compile":
            return bool(results.get("compile"))
        cold = any("cold_s" in result for result in results.get(self.suite, {}).values())
        return cold or any(True for _ in tables.complete(results, self.suite))


def _of(suite: str, function: Callable[..., str]) -> Callable[..., str]:
    """A table that serves several suites, of one."""
    return lambda results, form: function(results, suite, form)


def _ending(ending: str) -> Callable[..., str]:
    return lambda results, form: train_tables.kernel_times(results, ending, form)


TOGETHER = "All cases, *joules* those of ours over torch.compile's:"
CEILINGS = (
    "How many times as fast torch.compile's calls were, by their profiles, if all but their GEMMs "
    "took no time; *at most*, where profiles leave out short kernels, which may be GEMMs:"
)
GRAPHS = "Replayed as CUDA graphs, and what an ordinary call costs the host:"
SECTIONS = (
    Section(
        "layer",
        "Layer",
        LAYER_NOTES,
        (
            ("", _of("layer", tables.layer_times)),
            (GRAPHS, _of("layer", tables.layer_graphs)),
            ("Errors:", _of("layer", tables.errors)),
        ),
    ),
    Section(
        "layer_train",
        "Layer, training",
        LAYER_TRAIN_NOTES,
        (
            ("", _of("layer_train", tables.layer_times)),
            (GRAPHS, _of("layer_train", tables.layer_graphs)),
            ("What a step needs beyond weights and inputs:", train_tables.layer_memory),
            ("Errors of the gradients:", _of("layer_train", tables.errors)),
        ),
    ),
    Section(
        "grid",
        "Grid of layers",
        GRID_NOTES,
        (
            (TOGETHER, _of("grid", grid_tables.together)),
            (CEILINGS, _of("grid", grid_tables.ceilings)),
            ("Each:", _of("grid", grid_tables.cases)),
        ),
    ),
    Section(
        "families",
        "Families of models",
        FAMILIES_NOTES,
        (
            (TOGETHER, _of("families", grid_tables.together)),
            ("Each:", _of("families", grid_tables.cases)),
        ),
    ),
    Section(
        "fp8",
        "FP8",
        FP8_NOTES,
        (
            ("", fp8_tables.times),
            ("Peak memory of a step beyond weights and inputs, MiB:", fp8_tables.peaks),
            ("Of each recipe under coda, times over those of others:", fp8_tables.gains),
            ("Errors, the mean and the largest:", fp8_tables.errors),
            ("Seconds of the first call, caches empty:", fp8_tables.cold),
        ),
    ),
    Section(
        "kernels",
        "Kernels",
        KERNELS_NOTES,
        (
            ("Forward:", _ending("")),
            ("Forward and backward:", _ending(STEP)),
            ("Worst error among outputs and gradients:", train_tables.kernel_errors),
        ),
    ),
    Section(
        "llama",
        "Llama",
        LLAMA_NOTES,
        (
            ("", tables.llama_times),
            ("Errors of the last position's logits:", _of("llama", tables.errors)),
        ),
    ),
    Section(
        "model_train",
        "Models, training",
        LLAMA_TRAIN_NOTES,
        (
            ("", train_tables.step_times),
            ("Peak memory of a step:", train_tables.step_memory),
            ("With one pattern disabled (peak beyond the model):", train_tables.step_parts),
            ("Errors of the gradients:", _of("model_train", tables.errors)),
        ),
    ),
    Section("compile", "Compile time", COMPILE_NOTES, (("", tables.compile_seconds),)),
)
