# SPDX-License-Identifier: Apache-2.0
"""Passes on Dynamo's graph, before AOTAutograd: in order, idioms, attention, late_gradients."""
