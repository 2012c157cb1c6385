# SPDX-License-Identifier: Apache-2.0
"""Advice for users about each reason (by ``refusal.Refusal.code``).

Every code that the package uses is listed here, once; a test compares. Codes with one remedy share
its text, which does not repeat what the reasons say.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """Advice for one code: ``text`` says what to do; ``possible``: can anything be done?"""

    text: str
    possible: bool = True


#: What to do -> for which codes.
_DO = {
    "Please report it with the message. The site runs as with Inductor alone.": (
        "defect",
        "no-working-config",
    ),
    "The docstring of the pattern file lists its conditions. If one raises, fix it at the line "
    "that the message names.": ("condition", "pattern-failed"),
    "One of your options says so: 'disable', 'gate', 'numerics' or 'reference'.": (
        "disabled", "eager-numerics", "gate-never", "reference-asked",
    ),
    # where kernels run
    "Run on an NVIDIA GPU of the Hopper generation or newer.": (
        "no-cuda", "no-kernels-on-device", "old-gpu",
    ),
    "python -m coda_inductor tune measures it.": ("gpu-not-measured",),
    "Run the exported program in Python instead: torch.compile(program.module()).": (
        "aot-inductor",
    ),
    "pip install 'coda-inductor[cuda]'": ("no-kernel-stack",),
    # does it pay
    "Run more tokens in one call (batch x sequence), or use mode='reduce-overhead' (CUDA graphs), "
    "which removes the limit of the host. options={'gate': 'always'} fuses anyway.": (
        "too-small", "split-copies-gradient",
    ),
    # dtypes, sizes, memory
    "Run the model in bfloat16, its residual stream too: model.to(torch.bfloat16), or "
    "torch.autocast around the call.": (
        "kernel-dtype", "mask-dtype", "norm-input-dtype",
    ),
    "Give these tensors one floating dtype, and cast only behind them. Under autocast, exclude "
    "none of their layers.": (
        "float64-mixed", "gemm-dtypes", "logits-dtypes", "norm-gemm-dtypes", "result-dtype",
    ),
    "Use bfloat16; or options={'fp16_norms': True}, if the residual stream stays far below "
    "65504.": ("float16-overflow",),
    "Pad the layer's features (a vocabulary, most often), e.g. with "
    "model.resize_token_embeddings(pad_to_multiple_of=8). Where weights' gradients are in FP8, "
    "pad the rows of a step (batch x sequence) too.": ("not-multiple-of-8", "not-multiple-of-16"),
    "Use a recipe of torchao's with dynamic scaling and one FP8 dtype, without reduce_amax or "
    "bounds for the maximum. torch._scaled_mm takes one float32 scale per tensor, or one per row "
    "and per column, and none for its result.": ("fp8-cast", "fp8-form", "fp8-mixed"),
    "Quantize frozen weights by torchao's Float8DynamicActivationFloat8WeightConfig, in "
    "float8_e4m3fn, with granularity PerRow() or PerTensor() and without bounds, and train "
    "adapters alone.": (
        "fp8-frozen",
    ),
    "Quantize the operand in the layout in which it is multiplied: x.t().contiguous() before the "
    "cast.": ("fp8-layout",),
    "Keep weights as nn.Linear stores them, (out_features, in_features) and contiguous, each from "
    "a multiple of 16 bytes on.": ("paired-weight-layout", "unaligned"),
    "Make the result contiguous, and transpose behind it.": ("result-layout", "store-layout"),
    "Read elements in place of memory (index, reshape or clone, not as_strided), and give a "
    "custom op for which all strides are fine the tag torch.Tag.flexible_layout.": (
        "memory-seen",
    ),
    "Compile with dynamic=False, or mark only one of batch and sequence as dynamic "
    "(torch._dynamo.mark_dynamic).": ("symbolic-features", "symbolic-shape"),
    # gates, norms, losses
    "Give gate and up one shape and the model's 16-bit dtype, and cast behind their product.": (
        "gate-dtype", "gate-shape", "paired-store-wide",
    ),
    "Look at what lies between the norm and the GEMM in front of it: an op that no epilogue has, "
    "a reshape of the rows, or another norm.": ("norm-input-elsewhere",),
    "If no linear layer reads the norm (one of queries, one behind a projection, the last one "
    "where logits are returned), nothing to do. Otherwise let linear layers alone read it, "
    "without a reshape, and let nothing else (a hook, a second loss) add to its gradient.": (
        "norm-gradient", "norm-read-elsewhere", "norm-reshaped",
    ),
    "Give the norm a weight of shape (hidden,).": ("norm-result-shape", "norm-weight-shape"),
    "Nothing to do if the model returns its logits with the loss, and they take less than 512 "
    "MiB. Otherwise remove what reads all logits or their gradient between the loss and the LM "
    "head (a penalty, for example).": ("logits-read",),
    "Give class indices (M,), and logits (M, V) with the classes last.": ("loss-targets",),
    # growing an epilogue
    "Move the border of the checkpoint, e.g. checkpoint two layers at a time: ops on different "
    "sides of it cannot share a kernel.": ("checkpoint-border",),
    "Write it with elementwise ops that the vocabulary has (coda_inductor/graph/vocabulary.py "
    "lists them), or leave it: Inductor runs it.": ("not-in-vocabulary",),
    "Use a Python number, or a floating tensor on the GEMM's device, of one value per row or "
    "column or of the full size (.expand_as). One vector for each row of a batch, (B, 1, N), "
    "needs 256 tokens or more in each, of a static size.": (
        "bias-form", "operand-broadcast", "operand-device", "operand-dtype", "operand-kind",
    ),
    # idioms
    "Pass it as a plain Python number, not as a tensor.": ("not-constant",),
    "Write it out of place (x = x * y, not x *= y), and let no_grad and autocast begin and end "
    "outside of it.": ("heads-mutated", "mask-mutated", "mutation"),
    "Do not reuse values from inside the norm or gate (its statistics, the float32 copy): compute "
    "them again where they are needed.": ("intermediate-used",),
    "For a gate, leave use_local_output=True (torch's default) in the styles of its projections. "
    "A norm of a sharded sequence (SequenceParallel) lies between collectives: nothing to do.": (
        "distributed-tensor",
    ),
    "Use LoRA as peft writes it, without DoRA and without a bias in A, its dropout a number "
    "between 0 and 1 and not in place, and torch._inductor.config.fallback_random at False.": (
        "dropout-eager", "dropout-form", "dropout-shared",
    ),
    "Use grouped products for experts, because they compile: in transformers 5, "
    'model.set_experts_implementation("grouped_mm"). Sum the rows of a token with a view and '
    "sum(1), index_add, scatter_add or bmm, and weight them after the last product.": (
        "experts-loop", "experts-sum",
    ),
    # attention
    "Pass is_causal=True in place of a causal mask, and no mask where nothing is padded; or "
    "compile with dynamic=False, and pad sequences to a few fixed lengths.": (
        "mask-data", "mask-size",
    ),
    "Give all heads one mask of shape (batch or 1, 1, queries, keys), and queries, keys and values "
    "4 dimensions and one batch size. Leave attention's dropout at 0, and use "
    "torch.utils.checkpoint in place of torch.compiler.nested_compile_region.": (
        "mask-dropout", "mask-heads", "mask-region", "mask-shape",
    ),
}  # fmt: skip

#: Why there is nothing to do -> for which codes.
_NOTHING = {
    "Nothing to do: it would take longer. options={'gate': 'always'} fuses anyway; another batch "
    "size may change it.": (
        "expected-slower", "mask-small", "measured-slower",
    ),
    "Nothing to do for a model's first norm, and behind another norm (Gemma 2). For other norms, "
    "look for an op after the GEMM that is not elementwise, or a graph break.": (
        "norm-input-no-gemm",
    ),
    # limits of the project, and properties of the model
    "Nothing to do.": (
        "async-tensor-parallel", "collective", "heads-tile", "idiom-form", "kernel-form",
        "mask-device", "mask-form", "no-gain",
        "no-gemm", "no-neighbours", "norm-experts", "not-on-tile", "operand-depends",
        "shared-memory", "statistics-only",
    ),
}  # fmt: skip

#: Code -> advice.
REMEDIES = {
    code: Remedy(text, possible)
    for possible, advice in ((True, _DO), (False, _NOTHING))
    for text, codes in advice.items()
    for code in codes
}
