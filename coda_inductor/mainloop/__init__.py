# SPDX-License-Identifier: Apache-2.0
"""From generated source to a compiled CuTeDSL GEMM: the only part that knows QuACK.

Layer map: ``ports`` (pure: how a program maps onto a GEMM's operands and outputs) -> ``readings``
(pure: how A and B are read) -> ``math`` and ``resources`` (device side), ``lean`` (small epilogue
buffers), ``heads`` (columns of a head that change places, sums over them) -> ``mod`` (source file
-> EpiMod) -> ``build`` (EpiMod + config -> launch plan) -> ``plan`` (a plan's launches) and
``ahead`` (plans compiled to disk, in a process without a GPU). ``store`` is where compiled kernels
are kept; ``requirements``, ``environment`` and ``availability`` say what is installed, and whether
it will do.

Importing this package imports neither quack nor cutlass.
"""
