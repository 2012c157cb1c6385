# SPDX-License-Identifier: Apache-2.0
"""FP8 in graphs: torchao's chains of ops become semantic ops, which are then expanded for kernels.

chains    one quantization, as torchao spells it in an aten graph
raising   the pass that makes quantizations and scaled products semantic ops, right after noops
scales    a tensor's maxima (from its epilogue, or by one read) and its scales
casts     the pass that expands quantizations, after the norms' pass
rest      scales of products that stayed unfused, after fusing
norms     an RMSNorm in front of a quantization is deferred until after it
"""
