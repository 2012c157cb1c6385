# SPDX-License-Identifier: Apache-2.0
"""Run by ``test_gpu_memory.py`` in a process of its own: pairs, joined sums and tiles of few rows
and ragged columns, each operand in memory of its own."""

from oracle import check
from programs import B_MAJOR, TERMS, inputs, kinds, legal

NAMES = ("swiglu", "norm_bwd_joined", "rms_partial")
for name in NAMES:
    for m in (1, 7, 129):
        program = legal(kinds()[name])
        how = {"b_major": B_MAJOR[name], "terms": TERMS[name], "device": "cuda"}
        check(program, *inputs(program, m, 264, 128, **how))
