# SPDX-License-Identifier: Apache-2.0
"""What a user can do about each reason for which something was not fused.

One table, from the text of a reason to a remedy. Reasons are made all over ``fuse``, ``rewrite``,
``raising``, ``runtime.support`` and the pattern files; a reason without an entry here gets
:data:`UNKNOWN`. Reasons nest ("nothing to absorb (view: ...)", "its GEMM mm is not fused: ..."): an
entry that only wraps another one names the group ``inner``, whose remedy is looked up in turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from coda_inductor.explanation import attention_remedies
from coda_inductor.explanation.attention_remedies import NOTHING


@dataclass(frozen=True)
class Remedy:
    """``text`` says what to do; ``possible`` is False where there is nothing to do."""

    text: str
    possible: bool = True


UNKNOWN = Remedy(
    'No advice for this one yet. TORCH_LOGS="+coda_inductor" shows every decision; '
    "docs/debugging.md says how to read it.",
)


def remedy(reason: str) -> Remedy:
    """What to do about ``reason``; :data:`UNKNOWN` if the table does not know it."""
    for pattern, text in _TABLE:
        match = pattern.search(reason)
        if match is None:
            continue
        if "inner" in pattern.groupindex:
            return remedy(match["inner"])
        return Remedy(text, not text.startswith(NOTHING))
    return UNKNOWN


_BUG = (
    "This is a defect of coda_inductor: please report it with the message. "
    "The site runs as Inductor would have had it."
)
_DTYPES = "Run the model in bfloat16: model.to(torch.bfloat16), or torch.autocast around the call."

_ROWS: tuple[tuple[str, str], ...] = (
    # wrappers first
    (r"^nothing to absorb, and ", f"{NOTHING}: no elementwise work stands behind this GEMM."),
    (r"^nothing to absorb \(\w+: (?P<inner>.*)\)$", ""),
    (r"^its GEMM \w+ is not fused: (?P<inner>.*)$", ""),
    (r"^the GEMM that makes its input, \w+, is not fused: (?P<inner>.*)$", ""),
    (r"in our own passes: |^its kernel does not compile|^raising idioms failed", _BUG),
    # may it: dtype, shape, device, kernel stack
    (
        r"^device \w+ has no kernels",
        "Run on an NVIDIA GPU (Hopper or newer): this device runs the programs as plain torch ops.",
    ),
    (r"^options\['reference'\] is set", "Leave the option out, to have kernels."),
    (r"^no CUDA device is available", "Run on an NVIDIA GPU (Hopper or newer)."),
    (r"^compute capability .* is not supported", "Kernels need Hopper or newer."),
    (r"^nothing was measured on ", "Measure options={'gate': 'always'}: it fuses all the same."),
    (r"^\S+ (\S+ )?is (not )?installed", "pip install 'coda-inductor[cuda]'"),
    (r"^QUACK_CACHE_ENABLED=", "Unset QUACK_CACHE_ENABLED."),
    (r"^a \S+ GEMM has no kernel|^float64 operands and stores", _DTYPES),
    (r"has no epilogue program$", _DTYPES + " Both factors of a product need one floating dtype."),
    (
        r"^N=\d+ and K=\d+ must be positive multiples of 8",
        (
            "Pad the layer's features (a "
            "vocabulary, most often) to a multiple of 8, e.g. "
            "model.resize_token_embeddings(pad_to_multiple_of=8)."
        ),
    ),
    (r"no multiple of 16 bytes$", "Let each weight start at a multiple of 16 bytes of its buffer."),
    (
        r"^no view in the region makes the symbolic shape",
        "Compile with dynamic=False, or mark only one dimension as dynamic.",
    ),
    (
        r"^N or K is symbolic",
        (
            "Keep weights static: mark only batch and sequence as dynamic "
            "(torch._dynamo.mark_dynamic), not the feature dimension."
        ),
    ),
    (r"^its operands are not tensors", f"{NOTHING}: this is no product of two dense tensors."),
    (r"^one of its sizes is 0", f"{NOTHING}: there is nothing to compute."),
    (r"^options\['gate'\] is 'never'", "Leave options['gate'] at 'auto'."),
    (
        r"^too small: ",
        (
            "Use a larger batch or longer sequences, or mode='reduce-overhead' (CUDA "
            "graphs lift the host's limit); options={'gate': 'always'} fuses anyway."
        ),
    ),
    (
        r"^expected .* us fused, .* us unfused",
        (
            f"{NOTHING}: fusing would cost time at this shape. "
            "options={'gate': 'always'} fuses anyway; another batch size may change it."
        ),
    ),
    (r"^a program without a tile store", f"{NOTHING}: nothing of the tile would be written."),
    (r"is one value for the whole tile: nothing to fuse", f"{NOTHING}: the result is a constant."),
    (
        r"paired stores are 16-bit",
        (
            "Cast gate and up to the model's 16-bit dtype before they are "
            "read elsewhere (a .float() behind them makes the kernel store float32)."
        ),
    ),
    (
        r"^paired weights must be K-major",
        ("Keep both weights as nn.Linear stores them: (out_features, in_features), contiguous."),
    ),
    (
        r"need more shared memory than",
        (f"{NOTHING}: the epilogue loads and stores too much for one tile."),
    ),
    # the norm's algebra
    (
        r"^float16: the un-normalized operand may overflow",
        (
            "Use bfloat16; or "
            "options={'fp16_norms': True}, if the residual stream stays far below 65504."
        ),
    ),
    (
        r"^its input is not made by a GEMM",
        (
            f"{NOTHING} for the first norm of a model: an embedding "
            "or an input stands in front of it. Elsewhere, look for an op between the "
            "GEMM and the norm "
            "that is not elementwise (dropout, a gather, a graph break)."
        ),
    ),
    (
        r"^its input is not made in the epilogue of",
        (
            "Look at what lies between that GEMM and the "
            "norm: an op outside of the vocabulary, a reshape of the rows, or a second "
            "norm (sandwich "
            "norms) stops the epilogue."
        ),
    ),
    (
        r"^no GEMM reads it",
        (f"{NOTHING}: a norm without a projection behind it stays with Inductor."),
    ),
    (
        r"\(.*\) reads it and is not a GEMM",
        (
            "The normalized tensor has another reader than "
            "projections (an output, a router, a residual around it): let that one read "
            "the input of the "
            "norm, if the model allows it. Where logits are returned beside a loss, the last "
            "norm's result is kept for their gradient: nothing to do."
        ),
    ),
    (r"reads it twice", f"{NOTHING}: the normalized tensor is multiplied by itself."),
    (
        r"reshapes its rows",
        ("Split into heads behind the projection, not between norm and projection."),
    ),
    (r"^its result is not (read|used)", f"{NOTHING}: the result is not used."),
    (
        r"^its GEMMs run in different dtypes",
        ("Give the projections behind one norm one dtype; under autocast, exclude none of them."),
    ),
    (r"^its rstd is read", f"{NOTHING}: a custom backward reads the norm's statistics."),
    (
        r"^its gradient is not a sum of GEMMs|^its gradient is read elsewhere",
        (
            "Something else than "
            "projections takes part in this norm's gradient (a hook, a second loss): it "
            "works without."
        ),
    ),
    # growing an epilogue
    (r"^it is an output of the graph", f"{NOTHING}: the GEMM's result leaves the graph as it is."),
    (r"^it is a \w+", f"{NOTHING}: the value comes from outside of the graph."),
    (
        r"belongs to the other one of forward and backward",
        (f"{NOTHING}: forward and backward are two graphs, a tile cannot wait for a gradient."),
    ),
    (
        r"border of an activation checkpoint",
        (
            "Put the border of the checkpoint elsewhere, e.g. "
            "around two layers at a time: what lies on both sides of it cannot share a kernel."
        ),
    ),
    (
        r"does not reduce one row or column",
        (
            f"{NOTHING}: only reductions over a whole row or column "
            "of the result (norm statistics, bias gradients) happen in an epilogue."
        ),
    ),
    (r"is not a reduction of floating values", f"{NOTHING}: the reduction is of integers."),
    (
        r"turns the tile",
        (
            f"{NOTHING}: the result is only "
            "transposed (a weight's gradient, a layout change), which is no arithmetic."
        ),
    ),
    (
        r"changes the tile's shape",
        (
            f"{NOTHING}: what follows splits the result (into heads, say), "
            "so that no elementwise work on the whole tile is left."
        ),
    ),
    (r"with \(.*\) is a copy|with \[.*\] is a copy|is a copy$", f"{NOTHING}: the op only copies."),
    (
        r"is not in the epilogue vocabulary",
        (
            "Write it with elementwise ops that the vocabulary has "
            "(coda_inductor/fuse/elementwise.py lists them), or leave it: Inductor runs it."
        ),
    ),
    (
        r"is not elementwise",
        (f"{NOTHING}: what follows is no elementwise work (attention, another product, a gather)."),
    ),
    (
        r"depends on this GEMM",
        (
            f"{NOTHING}: the operand is computed from this GEMM's own result "
            "over a full row or column, which is only known when all tiles are done."
        ),
    ),
    (
        r"broadcasts over part of the leading dimensions",
        (
            "Expand the operand to the full batch "
            "(.expand_as) or give it one value a row: a per-batch operand is neither tile, row nor "
            "column."
        ),
    ),
    (
        r"^(?!the input)\S+ is \S+, not a floating type",
        ("Use a floating mask (0.0 and 1.0) in place of a boolean or integer tensor."),
    ),
    (r"is on \S+, the GEMM on", "Move the operand to the GEMM's device."),
    (r"^\S+ is not a tensor|is not a plain number", "Use a plain Python number or a tensor."),
    (
        r"^only a store more",
        (f"{NOTHING}: Inductor computes it for free in the kernel that reads it."),
    ),
    (
        r"more than \d+ (tiles would be stored|tile operands|vector operands)",
        f"{NOTHING}: the epilogue is full; the rest stays with Inductor.",
    ),
    (
        r"^a paired tile reads one value a row or a column",
        f"{NOTHING}: a tensor of the tile's size meets gate or up; the unpaired form reads it.",
    ),
    (
        r"is not laid out row by row",
        ("Make the result contiguous: a transposed output is stored column by column."),
    ),
    (
        r"read outside and is not a floating tile",
        (f"{NOTHING}: a mask or an integer cannot be stored by an epilogue."),
    ),
    (
        r"its bias or alpha/beta is not supported",
        ("Use a bias with one value a column and no alpha or beta (F.linear)."),
    ),
    (
        r"^expected .* us for reading its weights",
        (
            f"{NOTHING}: a LayerNorm put off reads its weights once more, too much for few rows, "
            "and in training sums the gradients behind it (options={'gate': 'always'} does it)."
        ),
    ),
    (
        r"^putting its weight's gradient together costs more",
        "Use more rows a step (batch x sequence), or two weights in place of the packed one.",
    ),
    (
        r"^its product is stored as it is for an elementwise kernel",
        f"{NOTHING}: the norm stands in front of a residual, whose kernel reads the product.",
    ),
    (
        r"^no LayerNorm in front of it has computed the mean",
        (
            f"{NOTHING}: without a mean at hand the operand would round worse than eager's. The "
            "first LayerNorm of a model, and one behind an activation, stay with Inductor."
        ),
    ),
    (
        r"^float32: where a row's mean|is added to the tensor whose mean is known",
        (
            "Run the model in bfloat16, its residual stream too: in float32 the norm is more exact "
            "where it is."
        ),
    ),
    (
        r"^plain ops round its product",
        'options={"reference": True} computes what kernels do; a GPU with kernels needs no option.',
    ),
    (
        r"^the gate is computed in another dtype",
        "Give gate and up one dtype, or cast behind their product.",
    ),
    # the loss
    (r"^its logits take \d+ MiB only", f"{NOTHING}: the gradient of small logits is no burden."),
    (
        r"\(.*\) reads it too$",
        (
            "Something between the loss and the LM head (a penalty on them, say) reads the "
            "gradient of all logits: it is then made in one piece."
        ),
    ),
    (
        r"^it is not the gradient of one linear layer|^its linear layer makes several rows",
        f"{NOTHING}: the logits are not one linear layer's.",
    ),
    (r"^logits, weight and operand differ in dtype", "Give the LM head one dtype."),
    (
        r"^the targets are probabilities|^the logits .* do not have their classes",
        "Give class indices (M,), and logits (M, V) with the classes last.",
    ),
    (r"^\S+ is not a constant$", "Pass the loss's options as plain Python numbers."),
    (r"^a gradient of the turns is wanted", f"{NOTHING}: learned rotations stay as they are."),
    # raising idioms
    (r"differentiates forward", f"{NOTHING}: forward-mode gradients go through torch's own ops."),
    (
        r"in-place op or a grad/autocast mode change",
        (
            "Write it out of place (x = x * y, not x *= "
            "y), and keep no_grad and autocast borders outside of the norm or gate."
        ),
    ),
    (
        r"^its intermediate \w+ is used elsewhere",
        (
            "Do not reuse values from inside the norm or "
            "gate (its statistics, the float32 copy): compute them again where they are needed."
        ),
    ),
    (r"^eps is not a constant", "Pass eps as a Python number, not as a tensor."),
    (r"^the \S+ is not one value a column", "Give the norm a weight of shape (hidden,)."),
    (
        r"is not shaped like the input",
        ("The weight broadcasts the result to another shape: give it one value a column."),
    ),
    (r"^the input is \S+, not a floating type|^gate or up is not floating", _DTYPES),
    (r"differ in shape", "Gate and up need one shape: no broadcast between them."),
    (
        r"float64, (its GEMM|the GEMM|which its input) is not$",
        "Compute in float32, or all in float64.",
    ),
    (
        r"^the result has another dtype|^dtype would change",
        ("Remove the cast in the middle of the idiom, or cast behind it."),
    ),
    (
        (
            r"^(shape|stride|device) would change|shape of the input is unknown"
            r"|no fake value is recorded|^gate or up is not a tensor|^the shape of (the|an) "
        ),
        f"{NOTHING}: torch.compile records too little here.",
    ),
)

_TABLE = tuple((re.compile(pattern), text) for pattern, text in (*_ROWS, *attention_remedies.ROWS))
