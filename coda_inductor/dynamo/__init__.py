# SPDX-License-Identifier: Apache-2.0
"""Passes on Dynamo's graph, before AOTAutograd: in order, spelling, in_place, losses, packed,
shared_inputs, idioms, attention and late_gradients."""
