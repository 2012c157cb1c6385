# SPDX-License-Identifier: Apache-2.0
"""Programs that know heads, which the render, compile and GPU tests share."""

from __future__ import annotations

from kinds import kinds
from programs import legal

from coda_inductor.program import EpilogueProgram, Operand, Step, Store


def rotary(
    head: int,
    width: int | None = None,
    distance: int | None = None,
    dtype: str = "bfloat16",
    tables: str = "",
) -> EpilogueProgram:
    """A projection with a bias, behind a norm: ``width`` columns of each head are rotated, of which
    those ``distance`` apart belong together (None: all of them, halves of it)."""
    width = width or head
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(
            Operand("rstd", "col", "float32"),
            Operand("bias", "row", dtype),
            Operand("bias_turned", "row", dtype),
            Operand("cos", "table", tables or dtype),
            Operand("sin", "table", tables or dtype),
        ),
        steps=(
            Step("scaled", "mul", ("acc", "rstd")),
            Step("x", "add", ("scaled", "bias")),
            Step("other", "swap", ("acc", float(width), float(distance or width // 2))),
            Step("other_scaled", "mul", ("other", "rstd")),
            Step("turned", "add", ("other_scaled", "bias_turned")),
            Step("x_cos", "mul", ("x", "cos")),
            Step("turned_sin", "mul", ("turned", "sin")),
            Step("y", "add", ("x_cos", "turned_sin")),
        ),
        stores=(Store("out0", "y", dtype),),
        head=head,
    )


def everything(dtype: str = "bfloat16") -> EpilogueProgram:
    """Two swaps beside each kind of operand."""
    steps = (
        Step("scaled", "mul", ("acc", "scale")),
        Step("x", "add", ("scaled", "bias")),
        Step("size", "abs", ("x",)),
        Step("log", "log1p", ("size",)),
        Step("half", "swap", ("acc", 64.0, 32.0)),
        Step("next", "swap", ("acc", 32.0, 1.0)),
        Step("both", "add", ("half", "next")),
        Step("rated", "mul", ("both", "log")),
        Step("later", "add", ("rated", "residual")),
        Step("y", "mul", ("later", "table")),
    )
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(
            Operand("scale", "scalar", "float32"),
            Operand("bias", "row", dtype),
            Operand("residual", "tile", dtype),
            Operand("table", "table", "float32"),
        ),
        steps=steps,
        stores=(Store("out0", "y", dtype), Store("out1", "x", dtype)),
        head=64,
    )


def programs(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    """By name: halves, neighbours and parts of a head, and what models have besides."""
    named = {
        **{name: program for name, program in kinds(dtype).items() if program.head},
        **{f"halves_{n}": rotary(n, dtype=dtype) for n in (64, 80, 96, 128, 256)},
        "neighbours_in_part": rotary(128, 64, 1, dtype=dtype),  # GPT-J
        "part_of_64": rotary(64, 16, dtype=dtype),  # Pythia
        "part_of_80": rotary(80, 32, dtype=dtype),  # Phi
        "everything": everything(dtype),
    }
    return {name: legal(program) for name, program in named.items()}
