# SPDX-License-Identifier: Apache-2.0
"""Passes on Dynamo's graph, before AOTAutograd: in order, spelling, likelihoods, idioms,
attention and late_gradients."""
