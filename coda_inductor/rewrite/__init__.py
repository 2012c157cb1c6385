# SPDX-License-Identifier: Apache-2.0
"""Algebra on semantic ops in the aten graph, one file per rule family.

fp8        torchao's FP8 training graphs: equal quantizations are merged, products have scales
norm       norms move past the GEMMs around them, forward and backward (R1 to R5)
loss       the gradient of the logits is computed one slice at a time (R7)
heads      queries and keys are rotated in the rows of their projection (R8)
embedding  its gradient touches only the rows that were looked up
recompute  the backward pass recomputes elementwise values
tables     sines and cosines are computed once
views      recorded values of views share memory like the real ones
borders    what one checkpointed block passes to the next is saved
"""
