# SPDX-License-Identifier: Apache-2.0
"""Programs of the sites of a Llama layer, forward and backward, of the activation of an ungated
MLP, of an LM head before a cross entropy, and of a projection to heads that are rotated."""

from __future__ import annotations

import functools

from coda_inductor.program import (
    EpilogueProgram,
    Operand,
    Reduce,
    Step,
    Store,
    consistent,
    simplify,
)


@functools.cache
def kinds(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    """Name of the kind -> its program."""
    norm_bwd = _norm_bwd(dtype)
    programs = {
        "scale": _scale(dtype),
        "rms_partial": _rms_partial(dtype),
        "swiglu": _swiglu(dtype),
        "swiglu_train": _swiglu(dtype, stores=("y", "g", "u")),
        "dswiglu": _dswiglu(dtype),
        "act_bwd": _act_bwd(dtype),
        "norm_bwd": norm_bwd,
        "norm_bwd_joined": norm_bwd,
        "logsumexp": _logsumexp(dtype),
        "rotary": _rotary(dtype),
    }
    return {name: simplify(consistent(program)) for name, program in programs.items()}


#: Which dimension of B has stride 1: a weight as it is stored, or its transpose in a backward.
B_MAJOR = {
    **dict.fromkeys(("scale", "rms_partial", "swiglu", "swiglu_train", "logsumexp", "rotary"), "k"),
    **dict.fromkeys(("dswiglu", "act_bwd", "norm_bwd", "norm_bwd_joined"), "n"),
}
#: How many products the accumulator is the sum of; K of a kind is the sum of all their K's.
TERMS = {**dict.fromkeys(B_MAJOR, 1), "norm_bwd_joined": 2}


def _scale(dtype: str) -> EpilogueProgram:
    """A projection after a norm: the row scale that was deferred."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(Operand("rstd", "col", "float32"),),
        steps=(Step("x", "mul", ("acc", "rstd")),),
        stores=(Store("out0", "x", dtype),),
    )


def _rms_partial(dtype: str) -> EpilogueProgram:
    """Attention output and down projection: residual in, residual and normalised operand out, row
    statistics."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(Operand("residual", "tile", dtype), Operand("weight", "row", dtype)),
        steps=(
            Step("x", "add", ("acc", "residual")),
            Step("h", "mul", ("x", "weight")),
            Step("sq", "mul", ("x", "x")),
        ),
        stores=(Store("out0", "x", dtype), Store("out1", "h", dtype)),
        reduces=(Reduce("part0", "sq"),),
    )


def _swiglu(dtype: str, stores: tuple[str, ...] = ("y",)) -> EpilogueProgram:
    """Gate and up; training keeps both projections as well."""
    return EpilogueProgram(
        accs=("acc0", "acc1"),
        a_dtype=dtype,
        operands=(Operand("rstd", "col", "float32"),),
        steps=(
            Step("g", "mul", ("acc0", "rstd")),
            Step("u", "mul", ("acc1", "rstd")),
            Step("s", "sigmoid", ("g",)),
            Step("act", "mul", ("g", "s")),
            Step("y", "mul", ("act", "u")),
        ),
        stores=tuple(Store(f"out{i}", value, dtype) for i, value in enumerate(stores)),
    )


def _dswiglu(dtype: str) -> EpilogueProgram:
    """The gradient through SwiGLU, in the down projection's dgrad: what goes to both projections,
    scaled by the norm's rstd, the gated activation once more, and the norm's row sums."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
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


def _act_bwd(dtype: str) -> EpilogueProgram:
    """The gradient through gelu (tanh) of z, and the activation once more."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(Operand("z", "tile", dtype),),
        steps=(
            Step("zz", "mul", ("z", "z")),
            Step("cubic", "mul", ("zz", 0.0356774)),
            Step("inner", "add", ("cubic", 0.797885)),
            Step("argument", "mul", ("z", "inner")),
            Step("t", "tanh", ("argument",)),
            Step("t1", "add", ("t", 1.0)),
            Step("gate", "mul", ("t1", 0.5)),
            Step("y", "mul", ("z", "gate")),
            Step("tt", "mul", ("t", "t")),
            Step("rest", "sub", (1.0, "tt")),
            Step("cubic3", "mul", ("zz", 0.1070322)),
            Step("inner1", "add", ("cubic3", 0.797885)),
            Step("half", "mul", ("z", 0.5)),
            Step("bent", "mul", ("half", "rest")),
            Step("bent1", "mul", ("bent", "inner1")),
            Step("slope", "add", ("gate", "bent1")),
            Step("dz", "mul", ("acc", "slope")),
        ),
        stores=(Store("out0", "dz", dtype), Store("out1", "y", dtype)),
    )


def _norm_bwd(dtype: str) -> EpilogueProgram:
    """The gradient through RMSNorm in its consumers' dgrad: back into the residual stream, and the
    sums over M for the weight's gradient. ``coef`` comes from the row sums of the GEMM before."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(
            Operand("residual", "tile", dtype),
            Operand("x", "tile", dtype),
            Operand("weight", "row", dtype),
            Operand("coef", "col", "float32"),
        ),
        steps=(
            Step("scaled", "mul", ("acc", "weight")),
            Step("through", "mul", ("x", "coef")),
            Step("normed", "add", ("scaled", "through")),
            Step("dx", "add", ("normed", "residual")),
            Step("dot", "mul", ("acc", "x")),
        ),
        stores=(Store("out0", "dx", dtype),),
        reduces=(Reduce("part0", "dot", "col"),),
    )


def _logsumexp(dtype: str) -> EpilogueProgram:
    """The LM head: the logits, and their log-sum-exp over each tile's columns."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        stores=(Store("out0", "acc", dtype),),
        reduces=(Reduce("part0", "acc", "row", "logsumexp"),),
    )


def _rotary(dtype: str) -> EpilogueProgram:
    """A projection after a norm to queries or keys, which are rotated."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(
            Operand("rstd", "col", "float32"),
            Operand("cos", "table", dtype),
            Operand("sin", "table", dtype),
        ),
        steps=(
            Step("x", "mul", ("acc", "rstd")),
            Step("other", "swap", ("acc", 128.0, 64.0)),
            Step("turned", "mul", ("other", "rstd")),
            Step("x_cos", "mul", ("x", "cos")),
            Step("turned_sin", "mul", ("turned", "sin")),
            Step("y", "add", ("x_cos", "turned_sin")),
        ),
        stores=(Store("out0", "y", dtype),),
        head=128,
    )
