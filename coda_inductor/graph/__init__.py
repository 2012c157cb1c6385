# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of aten graphs: everything that passes ask of a graph or do to one.

nodes      recorded values, views, casts, readers
sizes      sizes that may be symbolic
gemms      what a GEMM is: its operands, sums of them, which one made a tensor
sides      forward or backward
edit       put nodes in, take them out
snapshots  put a graph back as it was
"""
