# SPDX-License-Identifier: Apache-2.0
"""Execution: custom ops, and the processes that compile kernels before they are needed.

op                    coda_inductor::gemm_epilogue, a fused site in the graph
linear_cross_entropy  coda_inductor::linear_cross_entropy_backward
on_cuda               kernels of ops around experts, of casts to FP8, of adapters behind dropout
launch                tensors -> a launched kernel
prepared              fast calls, if they differ from an earlier one only in M and addresses
direct                calls from compiled graphs without the dispatcher
pool                  kernels compiled in parallel, ahead of time
compiler              a process that compiles them

Importing ``op`` registers it and imports no kernel library (QuACK, CuTeDSL, Triton): those are
imported when the first kernel is built. If they are missing, that is a reason, not an error.
"""
