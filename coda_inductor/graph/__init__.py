# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of aten graphs: all questions that passes ask about a graph, and all edits.

read       what a node calls: an op, and its arguments by name
nodes      what is recorded of nodes, and what kind each is
walk       up to what a node is computed from, down to its readers
sizes      sizes that may be symbolic
vocabulary which ops an epilogue computes, and as which steps of a program
gemms      what a GEMM is: its operands, sums of GEMMs, which GEMM computes a tensor
sides      forward or backward
edit       put nodes in, run and erase calls
splice     insert the ops of a function
snapshots  restore a graph
collectives  what follows a collective
"""
