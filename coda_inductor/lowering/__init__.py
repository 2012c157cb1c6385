# SPDX-License-Identifier: Apache-2.0
"""The pass that fuses: regions that ``fuse`` grows and ``plan`` accepts become kernel calls.

driver     all GEMMs of a graph, in order
described  what the report of a GEMM says
lower      compiles the kernels of these calls, or expands the calls to plain ops
"""
