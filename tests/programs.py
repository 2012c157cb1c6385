# SPDX-License-Identifier: Apache-2.0
"""Programs and inputs that the render, compile and GPU tests share."""

from __future__ import annotations

import dataclasses
import functools

import torch
from kinds import TERMS, kinds

from coda_inductor.program import (
    EpilogueProgram,
    Operand,
    Reduce,
    Step,
    Store,
    consistent,
    simplify,
    verify,
)


def activation_chain(dtype: str = "bfloat16") -> EpilogueProgram:
    """gelu(tanh) + relu squared, clamped, behind a row bias; sums over N and M that need masks."""
    x3 = [
        Step("x", "add", ("acc", "bias"), "aten.add.Tensor"),
        Step("xx", "mul", ("x", "x")),
        Step("cubic", "mul", ("xx", 0.0356774)),
        Step("inner", "add", ("cubic", 0.797885)),
        Step("z", "mul", ("x", "inner")),
        Step("t", "tanh", ("z",), "aten.tanh"),
        Step("t1", "add", ("t", 1.0)),
        Step("half", "mul", ("x", 0.5)),
        Step("gelu", "mul", ("half", "t1")),
        Step("r", "relu", ("x",)),
        Step("rr", "mul", ("r", "r")),
        Step("both", "add", ("gelu", "rr")),
        Step("low", "maximum", ("both", -2.0)),
        Step("y", "minimum", ("low", 2.0)),
    ]
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(Operand("bias", "row", dtype),),
        steps=tuple(x3),
        stores=(Store("out0", "y", dtype),),
        reduces=(Reduce("rows", "y"), Reduce("cols", "y", "col")),
    )


def select(dtype: str = "bfloat16") -> EpilogueProgram:
    """Leaky select on a comparison of two tiles (one float32), with max reductions both ways."""
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(
            Operand("other", "tile", dtype),
            Operand("wide", "tile", "float32"),
            Operand("slope", "scalar", "float32"),
            Operand("shift", "col", dtype),
        ),
        steps=(
            Step("x", "add", ("acc", "shift")),
            Step("over", "gt", ("x", "other")),
            Step("pos", "ge", ("x", 0.0)),
            Step("keep", "logical_and", ("over", "pos")),
            Step("scaled", "mul", ("wide", "slope")),
            Step("y", "where", ("keep", "x", "scaled")),
        ),
        stores=(Store("out0", "y", "float32"), Store("out1", "x", dtype)),
        reduces=(Reduce("top", "x", "row", "max"), Reduce("topc", "x", "col", "max")),
    )


def paired_sums(dtype: str = "bfloat16") -> EpilogueProgram:
    """SwiGLU that also stores both projections, with every reduction a pair can have."""
    base = kinds(dtype)["swiglu"]
    return EpilogueProgram(
        accs=base.accs,
        a_dtype=dtype,
        operands=base.operands,
        steps=base.steps,
        stores=(*base.stores, Store("out1", "g", dtype), Store("out2", "u", dtype)),
        reduces=(
            Reduce("rows", "y"),
            Reduce("cols", "y", "col"),
            Reduce("top", "y", "row", "max"),
        ),
    )


def legal(program: EpilogueProgram) -> EpilogueProgram:
    """``program`` as the fuser would make it: its statistics are of what it stores."""
    return verify(simplify(consistent(program)))


def row_statistics(dtype: str = "bfloat16") -> EpilogueProgram:
    """The LM head of a loss: scaled logits and the log-sum-exp of their rows (rule R7)."""
    lse = Reduce("lse", "x", "row", "logsumexp")
    return dataclasses.replace(kinds(dtype)["scale"], reduces=(lse,))


def paired_rows(dtype: str = "bfloat16") -> EpilogueProgram:
    """SwiGLU behind a LayerNorm: scale, shift and offset of both projections, sums both ways, the
    one over N with a mask."""
    row = functools.partial(Operand, kind="row")
    return EpilogueProgram(
        accs=("acc0", "acc1"),
        a_dtype=dtype,
        operands=(
            Operand("m", "col", "float32"),
            Operand("rstd", "col", "float32"),
            row("wg", dtype="float32"),
            row("wu", dtype="float32"),
            row("bias", dtype=dtype),
        ),
        steps=(
            Step("g0", "mul", ("m", "wg")),
            Step("g1", "sub", ("acc0", "g0")),
            Step("g", "mul", ("g1", "rstd")),
            Step("u0", "mul", ("m", "wu")),
            Step("u1", "sub", ("acc1", "u0")),
            Step("u2", "mul", ("u1", "rstd")),
            Step("u", "add", ("u2", "bias")),
            Step("s", "sigmoid", ("g",)),
            Step("act", "mul", ("g", "s")),
            Step("y", "mul", ("act", "u")),
        ),
        stores=(Store("out0", "y", dtype), Store("out1", "g", dtype), Store("out2", "u", dtype)),
        reduces=(Reduce("rows", "y"), Reduce("cols", "u", "col")),
    )


#: op -> a value in [-inf, inf] that is made fit for its domain first, by other ops.
_DOMAIN = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log1p", "reciprocal"), "positive"),
    **dict.fromkeys(("exp", "exp2", "expm1"), "small"),
}


def one_op(op: str, dtype: str = "bfloat16") -> EpilogueProgram:
    """``op`` alone on the accumulator (moved into its domain), with a tile operand if binary."""
    from coda_inductor.program.ops import OPS

    spec = OPS[op]
    steps = [
        Step("size", "abs", ("acc",)),
        Step("positive", "add", ("size", 0.5)),
        Step("small", "maximum", ("acc", -4.0)),
    ]
    source = _DOMAIN.get(op, "acc")
    other = "positive" if op == "div" else "other"
    if op.startswith("logical_"):
        steps += [Step("p", "lt", ("acc", 0.0)), Step("q", "gt", ("other", 0.0))]
        source, other = "p", "q"
    if op == "where":
        steps += [Step("p", "lt", ("acc", 0.0)), Step("v", "where", ("p", "other", "acc"))]
    else:
        steps.append(Step("v", op, (source, other)[: spec.arity]))
    value = "v"
    if spec.boolean:
        steps.append(Step("number", "where", ("v", "acc", "other")))
        value = "number"
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(Operand("other", "tile", dtype),),
        steps=tuple(steps),
        stores=(Store("out0", value, dtype),),
    )


def programs(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    """The representative programs, by name."""
    named = {
        **{n: p for n, p in kinds(dtype).items() if TERMS[n] == 1 and not p.head},
        "chain": activation_chain(dtype),
        "select": select(dtype),
        "paired_sums": paired_sums(dtype),
        "row_statistics": row_statistics(dtype),
        "paired_rows": paired_rows(dtype),
    }
    return {name: legal(program) for name, program in named.items()}


def inputs(
    program: EpilogueProgram,
    m: int,
    n: int,
    k: int,
    *,
    b_major: str = "k",
    device: str = "cpu",
    integers: bool = False,
    terms: int = 1,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Random (as_, bs, operands) for ``program``; products of order one. Of a program with heads
    ``n`` is rounded up to whole ones.

    With ``integers``, small ones: every sum is exact, so comparisons come out the same everywhere.
    ``terms``: how many products, each over K, the accumulator is the sum of.
    """

    def randn(*shape: int, dtype: str) -> torch.Tensor:
        values = torch.randn(shape, device=device)
        return (values.mul(1.5).round().clamp(-3, 3) if integers else values).to(
            getattr(torch, dtype)
        )

    n = -(-n // program.head) * program.head if program.head else n
    as_ = [randn(m, k, dtype=program.a_dtype) for _ in range(terms)]
    bs = []
    for _ in range(terms * len(program.accs)):
        b = randn(*((n, k) if b_major == "k" else (k, n)), dtype=program.b_dtype)
        if program.fp8:  # in which nothing is computed
            b = b if integers else (b.float() / k**0.5).to(b.dtype)
        else:
            b = b if integers else b / k**0.5
        bs.append(b.t() if b_major == "k" else b)
    shapes = {"tile": (m, n), "row": (n,), "col": (m,), "scalar": (), "table": (m, program.head)}
    operands = [randn(*shapes[o.kind], dtype=o.dtype) for o in program.operands]
    if program.paired:  # its rows are (2N,), every value twice
        operands = [
            x.repeat_interleave(2) if o.kind == "row" else x
            for o, x in zip(program.operands, operands, strict=True)
        ]
    return as_, bs, operands
