# SPDX-License-Identifier: Apache-2.0
"""Passes on Dynamo's graph, before AOTAutograd, in this order.

assertions      assertions of exported programs that hold are removed
in_place        ops in place become ops out of place where nothing sees the difference
losses          losses as people write them become cross entropies
packed          a packed weight of gate and up becomes two
dropouts        adapters behind dropout become products that draw their masks
experts         a mixture over grouped products; summed_pairs: how its rows are summed by token
idioms          what pattern files label becomes semantic ops
attention       masks and repeated heads of SDPA
late_gradients  returned logits get no made-up gradient
"""
