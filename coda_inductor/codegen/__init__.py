# SPDX-License-Identifier: Apache-2.0
"""Convert a program to text. All functions are pure: they need neither a graph nor a GPU.

ports   how a program maps onto a GEMM with C, D and vectors
render  program -> CuTeDSL source
"""
