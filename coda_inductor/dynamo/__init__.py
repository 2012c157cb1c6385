# SPDX-License-Identifier: Apache-2.0
"""Passes on Dynamo's graph, before AOTAutograd, in this order.

in_place        in-place ops become plain ops where nothing can see the difference
loops           sequences that a loop scores one by one are scored together
losses          losses in many spellings become cross entropies
kept_rows       logits of some rows become a product of these rows
packed          a packed weight of gate and up becomes two weights
dropouts        adapters behind dropout become products that draw their masks
frozen_fp8      layers with weights in FP8 become differentiable
experts         mixtures of experts over grouped products become semantic ops
idioms          the idioms of pattern files become semantic ops
attention       masks and repeated heads of SDPA become flags
late_gradients  returned logits get no gradient of zeros; summed_pairs helps ``experts``
"""
