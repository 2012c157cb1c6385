# SPDX-License-Identifier: Apache-2.0
"""FP8 in graphs: torchao's chains of ops become semantic ops, and these what kernels run.

recipes   torchao's recipes: which factor of which product has which scales
linears   the pass that quantizes the linear layers of an unmodified model
chains    what one quantization looks like in an aten graph
merge     the pass's first half: equal quantizations become one node
products  its second half: scaled products, without the copies in front of them
raising   the pass that does both, right after noops
scales    a tensor's maxima, in the epilogue that makes it or read once; its scales
casts     the pass that expands quantizations, behind that of the norms
rest      maxima that no epilogue took, and products that stayed unfused, after fusing
norms     RMSNorm in front of a quantization waits for it
"""
