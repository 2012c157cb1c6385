# SPDX-License-Identifier: Apache-2.0
"""Epilogue programs: the computation on a GEMM's accumulator tile before it leaves the chip.

ir      the frozen dataclasses, their JSON form and identity
operands  the tensors beside A and B: their kinds, and all differences between kinds
dtypes  every dtype that programs know
ops     the elementwise vocabulary
grouped   products of rows with the weights of their group, in plain torch
simplify  shorter programs with the same meaning
statistics  reductions read values as they are stored
scales  the factors that an unfused FP8 GEMM applies itself
verify  is a program legal?
reference  a program as plain torch ops: oracle, shape rule, fallback
"""

from coda_inductor.program.ir import EpilogueProgram, Reduce, Step, Store
from coda_inductor.program.operands import Operand
from coda_inductor.program.ops import OPS
from coda_inductor.program.simplify import simplify
from coda_inductor.program.statistics import consistent
from coda_inductor.program.verify import verify

__all__ = [
    "OPS", "EpilogueProgram", "Operand", "Reduce", "Step", "Store", "consistent", "simplify",
    "verify",
]  # fmt: skip
