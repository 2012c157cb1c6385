# SPDX-License-Identifier: Apache-2.0
"""Compile generated source to a CuTeDSL GEMM. Only this package uses QuACK.

Layer map: ``readings`` (pure: how A and B are read) -> ``math`` and ``resources`` (device side),
``lean`` (small epilogue buffers), ``heads`` (exchanged columns of a head), ``entropy`` (of rows) ->
``mod`` (source file -> EpiMod) -> ``build`` (EpiMod + config -> launch plan) -> ``plan`` (a plan's
launches) and ``ahead`` (plans compiled to disk, in a process without a GPU). ``store`` keeps
compiled kernels; ``environment`` and ``availability`` check the installed versions. ``tensors`` has
the layouts that TMA can read, ``approximations`` has functions without a branch. In Triton:
``dlogits`` (a slice of the logits' gradient), ``dropout`` (products that draw masks), ``experts``
(routing and its sums) and ``fp8_casts``.

Importing this package imports neither quack nor cutlass.
"""
