# SPDX-License-Identifier: Apache-2.0
"""FP8 in graphs: torchao's chains of ops become semantic ops, which are then expanded for kernels.

chains    one quantization as an aten graph spells it
raising   the pass that makes quantizations and scaled products semantic ops, right after noops
scales    a tensor's maxima, from the epilogue that computes it or by one read; its scales
casts     the pass that expands quantizations, after the norms' pass
rest      scales of products that stayed unfused, after fusing
norms     RMSNorm before a quantization is deferred until after it
"""
