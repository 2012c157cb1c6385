"""The programs that the shipped measurements were taken with, one a kind of site.

They are the sites of a Llama layer: attention output and down projection (residual in, residual
and normalised operand out, row statistics), gate and up, the projections behind a norm, and the
heaviest one of the backward, the gradient through SwiGLU. Other programs are costed by the kind
that moves as many bytes, see ``cost``.
"""

from __future__ import annotations

import functools

from coda_inductor.program import EpilogueProgram, Operand, Reduce, Step, Store


@functools.cache
def kinds(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    """Name of the kind -> its program."""
    scale = EpilogueProgram(
        accs=("acc",),
        in_dtype=dtype,
        operands=(Operand("rstd", "col", "float32"),),
        steps=(Step("x", "mul", ("acc", "rstd")),),
        stores=(Store("out0", "x", dtype),),
    )
    rms_partial = EpilogueProgram(
        accs=("acc",),
        in_dtype=dtype,
        operands=(Operand("residual", "tile", dtype), Operand("weight", "row", dtype)),
        steps=(
            Step("x", "add", ("acc", "residual")),
            Step("h", "mul", ("x", "weight")),
            Step("sq", "mul", ("x", "x")),
        ),
        stores=(Store("out0", "x", dtype), Store("out1", "h", dtype)),
        reduces=(Reduce("part0", "sq"),),
    )
    swiglu = EpilogueProgram(
        accs=("acc0", "acc1"),
        in_dtype=dtype,
        operands=(Operand("rstd", "col", "float32"),),
        steps=(
            Step("g", "mul", ("acc0", "rstd")),
            Step("u", "mul", ("acc1", "rstd")),
            Step("s", "sigmoid", ("g",)),
            Step("act", "mul", ("g", "s")),
            Step("y", "mul", ("act", "u")),
        ),
        stores=(Store("out0", "y", dtype),),
    )
    dswiglu = EpilogueProgram(
        accs=("acc",),
        in_dtype=dtype,
        operands=(
            Operand("g", "tile", dtype),
            Operand("u", "tile", dtype),
            Operand("rstd", "col", "float32"),
        ),
        steps=(
            Step("s", "sigmoid", ("g",)),
            Step("act", "mul", ("g", "s")),
            Step("y", "mul", ("act", "u")),
            Step("du", "mul", ("acc", "act")),
            Step("rest", "sub", (1.0, "s")),
            Step("bent", "mul", ("act", "rest")),
            Step("slope", "add", ("s", "bent")),
            Step("through", "mul", ("acc", "u")),
            Step("dg", "mul", ("through", "slope")),
            Step("dgr", "mul", ("dg", "rstd")),
            Step("dur", "mul", ("du", "rstd")),
            Step("dgg", "mul", ("dg", "g")),
            Step("duu", "mul", ("du", "u")),
            Step("dot", "add", ("dgg", "duu")),
        ),
        stores=(
            Store("out0", "dgr", dtype),
            Store("out1", "dur", dtype),
            Store("out2", "y", dtype),
        ),
        reduces=(Reduce("part0", "dot"),),
    )
    return {"scale": scale, "rms_partial": rms_partial, "swiglu": swiglu, "dswiglu": dswiglu}


#: Which dimension of B has stride 1: a weight as it is stored, or its transpose in a backward.
B_MAJOR = {"scale": "k", "rms_partial": "k", "swiglu": "k", "dswiglu": "n"}
