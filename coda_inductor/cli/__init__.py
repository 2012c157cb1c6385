# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m coda_inductor``, one file each, and their helpers.

bisect   find the pass, pattern or GEMM that makes a script fail
check    prove and try a pattern file
explain  what the backend does with a model
tune     measure what a model needs on this GPU
models   the model that a command is about
"""
