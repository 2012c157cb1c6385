# SPDX-License-Identifier: Apache-2.0
"""Algebra on semantic ops in the aten graph, one file per rule family.

noops      nodes without effect are removed
rows       residual streams that lie column by column are copied
collectives  equal collectives, and the collectives of a sum's terms, are merged
adapters   low-rank products are moved out of the way of epilogues
concatenated  a product of concatenated columns becomes a sum of products
columns    the gradient of a packed projection is written part by part
parts      rotated columns of a packed projection are a product of their own
fp8        torchao's FP8 graphs: equal quantizations are merged, products get scales
norm       norms move past the GEMMs around them, forward and backward (R1 to R4)
loss       the gradient of the logits is computed one slice at a time (R7)
heads      queries and keys get positions in the rows of their projection (R8)
embedding  an embedding's gradient touches only the rows that were looked up
decompose  ops that no rewrite used become the aten ops that define them
recompute  the backward pass recomputes elementwise values
tables     sines and cosines are computed once
experts    grouped products without an epilogue become the user's products again
borders    the tensors that one checkpointed block passes to the next are saved
"""
