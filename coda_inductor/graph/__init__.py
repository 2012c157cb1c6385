# SPDX-License-Identifier: Apache-2.0
"""Questions that passes ask about aten graphs, and all edits of graphs.

read       the call of a node: an op, and its arguments by name
nodes      the recorded values of nodes, and their kinds
walk       walks from a node up to its inputs, or down to its readers
sizes      comparisons of sizes that may be symbolic
vocabulary the ops that an epilogue computes, and their steps in a program
gemms      the operands of a GEMM, sums of GEMMs, the GEMM that computes a tensor
sides      does a node belong to the forward or the backward pass?
aliases    the readers of a tensor's memory, under any of its names; inputs that are written to
layout     give a tensor other strides, where nobody sees them
edit       insert, run and erase calls
splice     insert the ops of a function
snapshots  save and restore a graph
collectives  collectives, and the moves around them
"""
