# SPDX-License-Identifier: Apache-2.0
"""Advice for users about each reason (by ``refusal.Refusal.code``).

Every code that the package uses is listed here, once; a test compares. If there is nothing that a
user could or should change, the entry says why.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """Advice for one code: ``text`` says what to do; ``possible``: can anything be done?"""

    text: str
    possible: bool = True


_BFLOAT16 = "Run the model in bfloat16: model.to(torch.bfloat16), or torch.autocast around the call"
_HOPPER = "Run on an NVIDIA GPU (Hopper or newer)"
_ALWAYS = "options={'gate': 'always'} fuses anyway"

#: Advice that several codes share.
_DO = {
    # we failed, or the machine lacks something
    "defect": "This is a defect of coda_inductor: please report it with the message. The site runs "
    "as with Inductor alone.",
    "condition": "A side condition of the pattern file does not hold; its docstring lists them.",
    "pattern-failed": "The pattern file raised: fix it at the line that the message names.",
    "disabled": "Remove the name from options['disable'].",
    "no-kernels-on-device": f"{_HOPPER}: this device runs the programs as plain torch ops.",
    "reference-asked": "Remove options['reference'] to get kernels.",
    "no-cuda": f"{_HOPPER}.",
    "old-gpu": "Kernels need Hopper or newer.",
    "gpu-not-measured": "python -m coda_inductor tune measures it; options={'gate': "
    "'always'} fuses without measurements.",
    "aot-inductor": "Run the exported program in Python instead: torch.compile(program.module()).",
    "no-kernel-stack": "pip install 'coda-inductor[cuda]'",
    "kernel-dtype": f"{_BFLOAT16}.",
    "gemm-dtypes": f"{_BFLOAT16}. Both factors of a product need one floating dtype.",
    "not-multiple-of-8": "Pad the layer's features (a vocabulary, most often) to a multiple of 8, "
    "e.g. model.resize_token_embeddings(pad_to_multiple_of=8).",
    "not-multiple-of-16": "FP8 needs multiples of 16: pad the layer's features, and the rows of "
    "a step (batch x sequence) where weights' gradients are in FP8.",
    "fp8-layout": "Quantize the operand in the layout in which it is multiplied (contiguous along "
    "the dimension that is summed over): x.t().contiguous() before the cast.",
    "fp8-mixed": "Use a recipe with one FP8 dtype, like torchao's rowwise ones, or a Hopper GPU.",
    "unaligned": "Let each weight start at a multiple of 16 bytes in its buffer.",
    "symbolic-shape": "Compile with dynamic=False, or mark only one dimension as dynamic.",
    "symbolic-features": "Keep weights static: mark only batch and sequence as dynamic "
    "(torch._dynamo.mark_dynamic), not the feature dimension.",
    # would it win
    "eager-numerics": "Leave options['numerics'] at 'fused'.",
    "gate-never": "Leave options['gate'] at 'auto'.",
    "too-small": "Use a larger batch or longer sequences, or mode='reduce-overhead' (CUDA graphs "
    f"remove the host's limit); {_ALWAYS}.",
    "split-copies-gradient": "Use more rows per step (batch x sequence), or two weights instead of "
    "the packed one.",
    # pairs
    "paired-store-wide": "Cast gate and up to the model's 16-bit dtype before they are read "
    "elsewhere (a .float() after them makes the kernel store float32).",
    "paired-weight-layout": "Keep both weights as nn.Linear stores them: (out_features, "
    "in_features), contiguous.",
    "gate-dtype": "Give gate and up one dtype, or cast after their product.",
    "gate-shape": "Gate and up need one shape: no broadcast between them.",
    # norms
    "float16-overflow": "Use bfloat16; or options={'fp16_norms': True}, if the residual stream "
    "stays far below 65504.",
    "norm-input-elsewhere": "Look at what lies between that GEMM and the norm: an op outside of "
    "the vocabulary, a reshape of the rows, or a second norm (sandwich norms) stops the epilogue.",
    "norm-read-elsewhere": "Nothing to do if no linear layer reads the norm (a norm of queries, a "
    "norm after a block), or if logits are returned with a loss, because their gradient needs the "
    "last norm's result. If a linear layer reads it too, let the other reader (an output, a "
    "router, a residual) read the norm's input, if the model allows it.",
    "norm-reshaped": "Split into heads after the projection, not between norm and projection. If "
    "the norm is after the projection (OLMo 2), nothing to do: no GEMM reads the norm.",
    "norm-gemm-dtypes": "Give the projections that read one norm one dtype; under autocast, "
    "exclude none of them.",
    "norm-gradient": "Something besides projections contributes to this norm's gradient (a hook, a "
    "second loss): without that, it can be fused.",
    "layer-norm-wide": "Run the model in bfloat16, its residual stream too: in float32 the norm is "
    "more exact where it is.",
    "layer-norm-rounds": 'options={"reference": True} computes what kernels do; a GPU with kernels '
    "needs no option.",
    "norm-weight-shape": "Give the norm a weight of shape (hidden,).",
    "norm-result-shape": "The weight broadcasts the result to another shape: give it one value per "
    "column.",
    "norm-input-dtype": f"{_BFLOAT16}.",
    # growing an epilogue
    "checkpoint-border": "Move the border of the checkpoint, e.g. checkpoint two layers at a "
    "time: ops on different sides of it cannot share a kernel.",
    "not-in-vocabulary": "Write it with elementwise ops that the vocabulary has "
    "(coda_inductor/graph/vocabulary.py lists them), or leave it: Inductor runs it.",
    "operand-broadcast": "One vector for each row of a batch, (B, 1, N), needs 256 tokens or more "
    "in each, of a static size (dynamic=False). Expand others to the full size (.expand_as).",
    "operand-dtype": "Use a floating mask (0.0 and 1.0) in place of a boolean or integer tensor.",
    "operand-device": "Move the operand to the GEMM's device.",
    "operand-kind": "Use a plain Python number or a tensor.",
    "store-layout": "Make the result contiguous: a transposed output is stored column by column.",
    "memory-seen": "Read elements in place of memory (index, reshape or clone, not as_strided), "
    "and give a custom op for which all strides are fine the tag torch.Tag.flexible_layout.",
    "bias-form": "Use a bias with one value per column and no alpha or beta (F.linear).",
    "float64-mixed": "Compute in float32, or all in float64.",
    "fp8-cast": "Quantize with torchao's dynamic scaling, without reduce_amax or bounds "
    "for the maximum: other casts to FP8 stay with Inductor. Under tensor parallelism, scales of "
    "rows need no other rank where rows are not split.",
    "fp8-form": "Give torch._scaled_mm one scale per row and one per column, or one per tensor, in "
    "float32, and none for its result.",
    # the loss
    "logits-read": "Nothing to do if the model returns its logits with the loss, and they take "
    "less than 512 MiB. Otherwise remove what reads the gradient of all logits between the loss "
    "and the LM head (for example a penalty).",
    "logits-dtypes": "Give the LM head one dtype.",
    "loss-targets": "Give class indices (M,), and logits (M, V) with the classes last.",
    # raising idioms
    "not-constant": "Pass it as a plain Python number, not as a tensor.",
    "mutation": "Write it out of place (x = x * y, not x *= y), and let no_grad and autocast begin "
    "and end outside of the norm or gate.",
    "intermediate-used": "Do not reuse values from inside the norm or gate (its statistics, the "
    "float32 copy): compute them again where they are needed.",
    "result-layout": "Normalize before you transpose: torch's own norms make a transposed input "
    "contiguous, and a reader may rely on that.",
    "result-dtype": "Remove the cast in the middle of the idiom, or cast after it.",
    "distributed-tensor": "For a gate, leave use_local_output=True (torch's default) in the styles "
    "of its projections. A norm of a sharded sequence (SequenceParallel) lies between "
    "collectives, where nothing could be fused with it: nothing to do.",
    # adapters
    "dropout-shared": "Use LoRA without DoRA (use_dora=False), or without dropout: DoRA multiplies "
    "the masked input by the base weight too.",
    "dropout-form": "Give the adapter's dropout a plain number between 0 and 1 and inplace=False, "
    "and its A no bias, as peft does.",
    "dropout-eager": "Leave torch._inductor.config.fallback_random at False: it asks for the masks "
    "that eager draws.",
    # experts
    "experts-sum": "Sum the rows of a token with a view and sum(1), index_add, scatter_add or bmm, "
    "and weight them after the last product.",
    "experts-loop": "Use grouped products for experts, because they compile: in transformers 5, "
    'model.set_experts_implementation("grouped_mm").',
    # attention
    "mask-size": "Compile with dynamic=False, pad sequences to a few fixed lengths, or pass "
    "is_causal=True in place of a causal mask.",
    "mask-dtype": f"{_BFLOAT16}.",
    "mask-dropout": "Leave attention's dropout at 0 (attention_dropout, dropout_p).",
    "mask-heads": "Give all heads one mask: of shape (batch or 1, 1, queries, keys).",
    "mask-region": "Use torch.utils.checkpoint in place of torch.compiler.nested_compile_region.",
    "mask-shape": "Give queries, keys and values 4 dimensions and one batch size, the number of "
    "query heads a multiple of the number of key and value heads.",
    "mask-mutated": "Build the mask out of place (torch.where, logical_and).",
    "heads-mutated": "Repeat the heads right before the call, from keys and values that are not "
    "changed in place.",
}

#: Limits of the project or properties of the model: nothing that a user should change, and why.
_NOTHING = {
    "expected-slower": "by an estimate, fusing takes longer at this shape, or gains less than an "
    f"estimate's margin. {_ALWAYS}; another batch size may change it",
    "measured-slower": "fusing was measured, and takes longer at this shape, or gains less than "
    f"the measurement's error. {_ALWAYS}",
    "no-working-config": "each of its kernels fails on this GPU: please report it, with the file "
    "under measured/ in the cache folder",
    "layer-norm-slower": "a deferred LayerNorm reads its weights once more, too much for few rows "
    "(options={'gate': 'always'} does it)",
    "layer-norm-training": "LayerNorms are deferred in inference only: in training the sums for "
    "their gradients take longer than the kernels that are saved. RMSNorms are deferred in both",
    "norm-input-no-gemm": "a model's first norm follows an embedding or an input, and Inductor "
    "computes a norm whose input is the sum of a residual and another norm (Gemma 2). For other "
    "norms, look for an op after the GEMM that is not elementwise (a gather, a collective), or a "
    "graph break",
    "collective": "a collective needs each rank's complete data before anything that follows; each "
    "side of it is fused by itself. Under FSDP, which shards no product, norms and GEMMs are not "
    "separated",
    "async-tensor-parallel": "Inductor overlaps it with its collective, which gains more. Without "
    "torch._inductor.config._micro_pipeline_tp it may be fused",
    "layer-norm-no-mean": "without a precomputed mean the operand would round worse than eager's. "
    "The first LayerNorm of a model, and one that follows an activation, stay with Inductor",
    "norm-experts": "kernels of experts read rows that are normalized already",
    "operand-depends": "the operand is computed from this GEMM's own result over a full row or "
    "column, which is complete only when all tiles are done",
    "heads-tile": "an epilogue reads tiles and tables only at its own position: it can rotate once",
    "rotary-width": "only rotations of whole halves, or of all neighboring pairs, are recognized",
    "mask-data": "if the mask holds data (padding, packed documents). Without padding, pass no "
    "mask: a causal model needs none",
    "mask-device": "FlexAttention, which skips what a mask hides, has kernels for both directions "
    "on CUDA only",
    "mask-small": f"skipping blocks pays for long sequences. {_ALWAYS}",
}
#: The same for reasons whose text already says why, by meaning.
_PLAIN = (
    "no-neighbours",  # nothing beside the GEMM is work on its result
    "no-gain",  # there is too little work to save
    "statistics-only",
    "not-on-tile",  # an epilogue sees its own tile, one value at each position
    "kernel-form",  # no kernel has that form, or so many operands
    "shared-memory",
    "no-gemm",  # nothing can absorb this op, or a reader needs its result unchanged
    "idiom-form",  # torch's own ops support it, the rewritten idiom does not
    "mask-form",  # attention can neither skip nor replace this mask
)

#: The remedy of these.
NOTHING = "Nothing to do."

#: Code -> advice.
REMEDIES: dict[str, Remedy] = {
    **{code: Remedy(text) for code, text in _DO.items()},
    **{code: Remedy(f"Nothing to do: {why}.", possible=False) for code, why in _NOTHING.items()},
    **dict.fromkeys(_PLAIN, Remedy(NOTHING, possible=False)),
}
