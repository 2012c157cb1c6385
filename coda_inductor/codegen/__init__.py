# SPDX-License-Identifier: Apache-2.0
"""A program becomes text: pure functions, no graph and no GPU.

ports   how a program maps onto a GEMM with C, D and vectors
render  program -> CuTeDSL source
"""
