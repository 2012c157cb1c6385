# SPDX-License-Identifier: Apache-2.0
"""The pass that fuses: what ``fuse`` finds, and ``plan`` takes, becomes calls of kernels.

driver  all GEMMs of a graph, in order
lower   kernels of these calls, or plain ops
"""
