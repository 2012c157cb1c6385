# SPDX-License-Identifier: Apache-2.0
"""Every GEMM absorbs the memory-bound work around it into its epilogue.

region       what an epilogue absorbs, and its program
grow         grow a GEMM's epilogue: absorb nodes in the order of the graph, or take them back
tile         ops of the graph become steps on the tile; which outside tensors it reads
stores       which values leave the tile, and which nodes a region gives up if it is too large
heads        ops that cross columns within the heads of a tile
sums         a sum of GEMMs is one GEMM, of operands in place or concatenated
pair         gate and up in one tile
emit         program -> graph
"""
