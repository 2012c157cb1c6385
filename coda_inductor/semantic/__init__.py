# SPDX-License-Identifier: Apache-2.0
"""The semantic ops: each replaces the many spellings of one idiom.

Each op is defined once, by a plain torch function (``define``), or, if it is elementwise like
SwiGLU, by the meaning of a pattern file. Passes match on the op. Ops that stay unfused are traced
through that function again, so that Inductor sees plain aten. Differentiable ops have a backward op
of the same kind, so that the joint graph is readable too; its flags tell which gradients are
needed, so that frozen weights need no extra patterns.

norms       norms of rows, and a record of the properties of each
loss        cross entropies of logits
rotary      embeddings of positions in queries and keys
experts     a mixture's routing, grouped products and sums
columns     parts of a matrix that are written in place
dropout     products behind dropout, and their gradients
fp8         quantizations, scaled products, layers on frozen weights
fp8_casts   the casts that quantizations become
"""

from coda_inductor.semantic.loss import cross_entropy
from coda_inductor.semantic.norms import rms_norm

__all__ = ["cross_entropy", "rms_norm"]
