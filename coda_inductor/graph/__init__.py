# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of aten graphs: everything that passes ask of a graph or do to one.

read       what a node says: an op, and its arguments by name
nodes      what is recorded of nodes, and what kind each is
walk       up to what a node is made of, down to who reads it
sizes      sizes that may be symbolic
vocabulary which ops an epilogue computes, and as which steps of a program
gemms      what a GEMM is: its operands, sums of them, which one made a tensor
sides      forward or backward
edit       put nodes in, take them out
snapshots  put a graph back as it was
"""
