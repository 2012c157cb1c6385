# SPDX-License-Identifier: Apache-2.0
"""Pass 4, fuse: every GEMM takes the memory-bound work around it into its epilogue.

elementwise  which aten ops become which steps
operands     how an outside tensor covers the tile
region       what an epilogue absorbs, and the program it makes
grow         grow a GEMM's epilogue
sums         a sum of GEMMs is one GEMM
pair         gate and up meet in one tile
policy       may it, should it, and how does it run
emit         program -> graph
driver       all GEMMs of a graph, in order
"""

from coda_inductor.fuse.driver import fuse_gemms
from coda_inductor.fuse.elementwise import REDUCTIONS
from coda_inductor.fuse.policy import Policy

__all__ = ["REDUCTIONS", "Policy", "fuse_gemms"]
