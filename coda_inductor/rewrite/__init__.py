# SPDX-License-Identifier: Apache-2.0
"""Algebra on semantic ops in the aten graph, one file a rule family.

packed          a projection whose halves meet becomes two (R6)
norms           RMSNorm's row scale moves past the GEMMs behind it (R1, R2)
layer_norms     LayerNorm's scale, shift and offset do (R5)
norm_uses       who reads a norm
behind          what comes behind a GEMM that reads a deferred norm
norms_backward  RMSNorm's gradient moves behind the GEMMs that make it (R3, R4)
layer_norms_backward  LayerNorm's does
loss            the gradient of the logits is made a slice at a time
lookup_gradients  an embedding's gradient touches only the rows that were looked up
recompute       the backward pass computes elementwise values anew
tables          sines and cosines are computed once
views           reshapes are views, which the partitioner does not save
borders         what one checkpointed block hands to the next is saved
"""

from coda_inductor.rewrite.borders import save_borders
from coda_inductor.rewrite.lookup_gradients import gather_lookup_gradients
from coda_inductor.rewrite.loss import slice_loss_gradient
from coda_inductor.rewrite.norms import defer_norms
from coda_inductor.rewrite.packed import split_packed
from coda_inductor.rewrite.recompute import recompute_in_backward
from coda_inductor.rewrite.tables import keep_tables
from coda_inductor.rewrite.views import reshapes_to_views

__all__ = [
    "defer_norms",
    "gather_lookup_gradients",
    "keep_tables",
    "recompute_in_backward",
    "reshapes_to_views",
    "save_borders",
    "slice_loss_gradient",
    "split_packed",
]
