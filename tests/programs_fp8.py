# SPDX-License-Identifier: Apache-2.0
"""Programs of FP8 that the compile and GPU tests share: the sites of a Llama layer in torchao's
rowwise recipe. The maxima are what the next quantization needs."""

from __future__ import annotations

import dataclasses

from programs import legal

from coda_inductor.program import EpilogueProgram, Operand, Reduce, Step, Store
from coda_inductor.program.dtypes import FP8

E4M3, E5M2 = FP8
_ROW = Operand("inv_a", "col", "float32")


def column(name: str) -> Operand:
    """The scales of a right operand."""
    return Operand(name, "row", "float32")


def residual() -> EpilogueProgram:
    """Attention output and down projection: residual and norm's operand out, its sum of squares and
    its maximum, one a row."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=E4M3,
        operands=(_ROW, column("inv_b"), Operand("res", "tile", "bfloat16"), column("gamma")),
        steps=(
            Step("y0", "mul", ("acc", "inv_a")),
            Step("y", "mul", ("y0", "inv_b")),
            Step("x", "add", ("y", "res")),
            Step("h", "mul", ("x", "gamma")),
            Step("sq", "mul", ("x", "x")),
            Step("size", "abs", ("h",)),
        ),
        stores=(Store("out0", "x", "bfloat16"), Store("out1", "h", "bfloat16")),
        reduces=(Reduce("squares", "sq"), Reduce("top", "size", "row", "max")),
    )


def swiglu() -> EpilogueProgram:
    """Gate and up, whose operand is shared: the activation and its maximum of each row."""
    return EpilogueProgram(
        accs=("acc0", "acc1"),
        a_dtype=E4M3,
        operands=(_ROW, column("inv_g"), column("inv_u")),
        steps=(
            Step("g0", "mul", ("acc0", "inv_a")),
            Step("g", "mul", ("g0", "inv_g")),
            Step("u0", "mul", ("acc1", "inv_a")),
            Step("u", "mul", ("u0", "inv_u")),
            Step("s", "sigmoid", ("g",)),
            Step("act", "mul", ("g", "s")),
            Step("y", "mul", ("act", "u")),
            Step("size", "abs", ("y",)),
        ),
        stores=tuple(Store(f"out{i}", x, "bfloat16") for i, x in enumerate(("y", "g", "u"))),
        reduces=(Reduce("top", "size", "row", "max"),),
    )


def dswiglu() -> EpilogueProgram:
    """Down's dgrad, of a gradient in e5m2: the gradients of gate and up, their maxima both ways,
    and the activation, whose scale the forward pass knew."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=E5M2,
        b_dtype=E4M3,
        operands=(
            _ROW,
            Operand("inv_b", "scalar", "float32"),
            Operand("g", "tile", "bfloat16"),
            Operand("u", "tile", "bfloat16"),
            column("scale"),
        ),
        steps=(
            Step("d0", "mul", ("acc", "inv_a")),
            Step("d", "mul", ("d0", "inv_b")),
            Step("s", "sigmoid", ("g",)),
            Step("act", "mul", ("g", "s")),
            Step("du", "mul", ("d", "act")),
            Step("rest", "sub", (1.0, "s")),
            Step("bent", "mul", ("act", "rest")),
            Step("slope", "add", ("s", "bent")),
            Step("through", "mul", ("d", "u")),
            Step("dg", "mul", ("through", "slope")),
            Step("gsize", "abs", ("dg",)),
            Step("usize", "abs", ("du",)),
            Step("y", "mul", ("act", "u")),
            Step("ys", "mul", ("y", "scale")),
            Step("low", "maximum", ("ys", -448.0)),
            Step("high", "minimum", ("low", 448.0)),
            Step("q", "round_float8_e4m3fn", ("high",)),
        ),
        stores=(
            Store("out0", "dg", "bfloat16"),
            Store("out1", "du", "bfloat16"),
            Store("out2", "q", E4M3),
        ),
        reduces=(
            Reduce("grow", "gsize", "row", "max"),
            Reduce("urow", "usize", "row", "max"),
            Reduce("gcol", "gsize", "col", "max"),
            Reduce("ucol", "usize", "col", "max"),
        ),
    )


def stored(dtype: str = E4M3) -> EpilogueProgram:
    """A projection whose result's scale is known beforehand: it leaves the tile in FP8."""
    scalars = ("inv_a", "inv_b", "scale")
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=E4M3,
        operands=tuple(Operand(name, "scalar", "float32") for name in scalars),
        steps=(
            Step("y0", "mul", ("acc", "inv_a")),
            Step("y", "mul", ("y0", "inv_b")),
            Step("r", "relu", ("y",)),
            Step("q", "mul", ("r", "scale")),
            Step("size", "abs", ("q",)),
        ),
        stores=(Store("out0", "q", dtype),),
        reduces=(Reduce("left", "size", "col", "max"),),
    )


def half_stored() -> EpilogueProgram:
    """The same of a GEMM of 16 bits."""
    return dataclasses.replace(stored(E5M2), a_dtype="bfloat16", b_dtype="bfloat16")


def programs() -> dict[str, EpilogueProgram]:
    """By name."""
    named = {
        "fp8_residual": residual(),
        "fp8_swiglu": swiglu(),
        "fp8_dswiglu": dswiglu(),
        "fp8_stored": stored(),
        "fp8_half_stored": half_stored(),
    }
    fast = ("fp8_residual", "fp8_swiglu", "fp8_dswiglu")
    named |= {f"{name}_fast": dataclasses.replace(named[name], fast=True) for name in fast}
    return {name: legal(program) for name, program in named.items()}
