# SPDX-License-Identifier: Apache-2.0
"""FP8 in graphs: torchao's chains of ops become semantic ops, and these what kernels run.

chains    what one quantization looks like in an aten graph
raising   the pass that makes quantizations and scaled products semantic ops, right after noops
scales    a tensor's maxima, in the epilogue that makes it or read once; its scales
casts     the pass that expands quantizations, behind that of the norms
rest      scales of products that stayed unfused, after fusing
norms     RMSNorm in front of a quantization waits for it
"""
