# SPDX-License-Identifier: Apache-2.0
"""Algebra on semantic ops in the aten graph, one file a rule family.

fp8        torchao's FP8 training graphs: equal quantizations are one, products have scales
norm       norms move past the GEMMs around them, forward and backward (R1 to R5)
loss       the gradient of the logits is made a slice at a time (R7)
heads      queries and keys are rotated in the rows of their projection (R8)
embedding  its gradient touches only the rows that were looked up
recompute  the backward pass computes elementwise values anew
tables     sines and cosines are computed once
views      recorded values of views share memory as they do
borders    what one checkpointed block hands to the next is saved
"""
