# SPDX-License-Identifier: Apache-2.0
"""Programs by name that the render, compile and GPU tests share, written as text.

Operands: "name:kind:dtype"; steps: "name op argument ..."; stores: "value:dtype"; reductions:
"name:value:axis:op". What is left out is the default.
"""

import dataclasses
import functools
from typing import Any

import torch

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
from coda_inductor.program.dtypes import FP8
from coda_inductor.program.ops import OPS

E4M3, E5M2 = FP8
_GATED = "s sigmoid g; act mul g s; y mul act u"
_SLOPE = "rest sub 1.0 s; bent mul act rest; slope add s bent"


def parsed(
    dtype: str, operands: str, steps: str, stores: str, reduces: str = "", **more: Any
) -> EpilogueProgram:
    """A program whose operands and stores have ``dtype`` unless they say otherwise."""
    split = [[name, *how] for name, *how in (o.split(":") for o in operands.split())]
    found = [line.split() for line in steps.split(";") if line.strip()]
    stored = [[*text.split(":"), dtype][:2] for text in stores.split()]
    given = {"accs": ("acc",), "a_dtype": dtype, **more}
    return EpilogueProgram(
        operands=tuple(Operand(*[*o, dtype][:3]) for o in split),
        steps=tuple(Step(name, op, tuple(map(_argument, rest))) for name, op, *rest in found),
        stores=tuple(Store(f"out{i}", *how) for i, how in enumerate(stored)),
        reduces=tuple(Reduce(*text.split(":")) for text in reduces.split()),
        **given,
    )


def _argument(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def legal(program: EpilogueProgram) -> EpilogueProgram:
    """``program`` as the fuser would make it: its statistics are of what it stores."""
    return verify(simplify(consistent(program)))


#: Which dimension of B has stride 1: a weight as it is stored, or its transpose in a backward.
B_MAJOR = {
    **dict.fromkeys(("scale", "rms_partial", "swiglu", "swiglu_train", "logsumexp", "rotary"), "k"),
    **dict.fromkeys(("dswiglu", "act_bwd", "norm_bwd", "norm_bwd_joined"), "n"),
}
#: How many products the accumulator is the sum of; K of a kind is the sum of all their K's.
TERMS = {**dict.fromkeys(B_MAJOR, 1), "norm_bwd_joined": 2}


@functools.cache
def kinds(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    """Sites of a Llama layer, forward and backward, an ungated MLP, and an LM head."""
    made = functools.partial(parsed, dtype)
    pair = functools.partial(
        made,
        "rstd:col:float32",
        f"g mul acc0 rstd; u mul acc1 rstd; {_GATED}",
        accs=("acc0", "acc1"),
    )
    norm_bwd = made(
        "residual:tile x:tile weight:row coef:col:float32",
        "scaled mul acc weight; through mul x coef; normed add scaled through;"
        "dx add normed residual; dot mul acc x",
        "dx",
        "part0:dot:col",
    )
    programs = {
        "scale": made("rstd:col:float32", "x mul acc rstd", "x"),
        "rms_partial": made(
            "residual:tile weight:row", "x add acc residual; h mul x weight; sq mul x x", "x h",
            "part0:sq",
        ),
        "swiglu": pair("y"),
        "swiglu_train": pair("y g u"),
        "dswiglu": made(
            "g:tile u:tile rstd:col:float32",
            f"{_GATED}; du mul acc act; {_SLOPE}; through mul acc u; dg mul through slope;"
            "dgr mul dg rstd; dur mul du rstd; dgg mul dg g; duu mul du u; dot add dgg duu",
            "dgr dur y", "part0:dot",
        ),
        "act_bwd": made(  # gelu (tanh) of z
            "z:tile",
            "zz mul z z; cubic mul zz 0.0356774; inner add cubic 0.797885; argument mul z inner;"
            "t tanh argument; t1 add t 1.0; gate mul t1 0.5; y mul z gate; tt mul t t;"
            "rest sub 1.0 tt; cubic3 mul zz 0.1070322; inner1 add cubic3 0.797885;"
            "half mul z 0.5; bent mul half rest; bent1 mul bent inner1; slope add gate bent1;"
            "dz mul acc slope",
            "dz y",
        ),
        "norm_bwd": norm_bwd,
        "norm_bwd_joined": norm_bwd,
        "logsumexp": made("", "", "acc", "part0:acc:row:logsumexp"),
        "rotary": made(
            "rstd:col:float32 cos:table sin:table",
            "x mul acc rstd; other swap acc 128.0 64.0; turned mul other rstd; x_cos mul x cos;"
            "turned_sin mul turned sin; y add x_cos turned_sin",
            "y", head=128,
        ),
    }  # fmt: skip
    return {name: simplify(consistent(program)) for name, program in programs.items()}


@functools.cache
def grouped(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    """A mixture's experts: gate and up, down, and both dgrads, one with the router's gradient."""
    made = functools.partial(parsed, dtype)
    routes = "groups:groups:int32 index:index:int32"
    programs = {
        "experts_up": made(
            routes, "s sigmoid acc0; act mul acc0 s; y mul act acc1", "acc0 acc1 y",
            accs=("acc0", "acc1"),
        ),
        "experts_alternating": made(
            f"{routes} b0:row b1:row", "z add acc0 b0; s sigmoid z; u add acc1 b1; y mul s u",
            "z u y", accs=("acc0", "acc1"), alternating=True,
        ),
        "experts_down": made("groups:groups:int32", "", "acc"),
        "experts_dgrad": made(
            f"{routes} w:col:float32 g:tile u:tile",
            f"{_GATED}; da mul acc w; du mul da act; {_SLOPE}; through mul da u;"
            "dg mul through slope; weighted mul y w; dot mul acc y",
            "dg du weighted",
            "part0:dot",
        ),
        "experts_join": made("groups:groups:int32", "", "acc"),
    }  # fmt: skip
    return {name: legal(program) for name, program in programs.items()}


def select(dtype: str = "bfloat16") -> EpilogueProgram:
    """Leaky select on a comparison of two tiles (one float32), with max reductions both ways."""
    return parsed(
        dtype,
        "other:tile wide:tile:float32 slope:scalar:float32 shift:col",
        "x add acc shift; over gt x other; pos ge x 0.0; keep logical_and over pos;"
        "scaled mul wide slope; y where keep x scaled",
        "y:float32 x",
        "top:x:row:max topc:x:col:max",
    )


def paired_sums(dtype: str = "bfloat16") -> EpilogueProgram:
    """SwiGLU that also stores both projections, with every reduction a pair can have."""
    reduces = (Reduce("rows", "y"), Reduce("cols", "y", "col"), Reduce("top", "y", "row", "max"))
    return dataclasses.replace(kinds(dtype)["swiglu_train"], reduces=reduces)


def row_statistics(dtype: str = "bfloat16") -> EpilogueProgram:
    """The LM head of a loss: scaled logits and the log-sum-exp of their rows (rule R7)."""
    lse = Reduce("lse", "x", "row", "logsumexp")
    return dataclasses.replace(kinds(dtype)["scale"], reduces=(lse,))


def programs(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    """The representative ones of 16 bits without heads."""
    made = functools.partial(parsed, dtype)
    named = {
        **{n: p for n, p in kinds(dtype).items() if TERMS[n] == 1 and not p.head},
        # gelu(tanh) + relu squared, clamped, behind a row bias; sums that need masks.
        "chain": made(
            "bias:row",
            "x add acc bias; xx mul x x; cubic mul xx 0.0356774; inner add cubic 0.797885;"
            "z mul x inner; t tanh z; t1 add t 1.0; half mul x 0.5; gelu mul half t1; r relu x;"
            "rr mul r r; both add gelu rr; low maximum both -2.0; y minimum low 2.0",
            "y", "rows:y cols:y:col",
        ),
        # What is behind an attention, with vectors of a batch; the sums need masks.
        "gated": made(
            "bias:row gate:batch residual:tile scale:batch:float32 mean:col:float32",
            "z add acc bias; y mul z gate; x add residual y; v sub x mean; h mul v scale;"
            "sq mul v v",
            "x h", "part0:v part1:sq",
        ),
        "paired_batches": made(
            "rstd:col:float32 m:col:float32 sums:batch:float32 shift:batch",
            "g0 mul m sums; g1 sub acc0 g0; g2 mul g1 rstd; g add g2 shift; u mul acc1 rstd;"
            f"{_GATED}",
            "y", accs=("acc0", "acc1"),
        ),
        "select": select(dtype),
        "paired_sums": paired_sums(dtype),
        "row_statistics": row_statistics(dtype),
        "entropy": made("", "", "acc", "lse:acc:row:logsumexp h:acc:row:entropy"),
        "unstored": made(  # the same where only statistics of the logits are wanted
            "column:row:float32 target:col:float32",
            "r round_bfloat16 acc; d sub column target; away abs d; hit lt away 0.5;"
            "chosen where hit r 0.0",
            "", "lse:r:row:logsumexp h:r:row:entropy picked:chosen",
        ),
        # SwiGLU with vectors of rows and columns for both products; the sum over N has a mask.
        "paired_rows": made(
            "m:col:float32 rstd:col:float32 wg:row:float32 wu:row:float32 bias:row",
            "g0 mul m wg; g1 sub acc0 g0; g mul g1 rstd; u0 mul m wu; u1 sub acc1 u0;"
            f"u2 mul u1 rstd; u add u2 bias; {_GATED}",
            "y g u", "rows:y cols:u:col", accs=("acc0", "acc1"),
        ),
    }  # fmt: skip
    return {name: legal(program) for name, program in named.items()}


#: op -> a value in [-inf, inf] that is made fit for its domain first, by other ops.
_DOMAIN = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log1p", "reciprocal"), "positive"),
    **dict.fromkeys(("exp", "exp2", "expm1"), "small"),
}


def one_op(op: str, dtype: str = "bfloat16") -> EpilogueProgram:
    """``op`` alone on the accumulator (moved into its domain), with a tile operand if binary."""
    spec = OPS[op]
    given = [_DOMAIN.get(op, "acc"), "positive" if op == "div" else "other"][: spec.arity]
    before, value = "", "v"
    if op.startswith("logical_"):
        before, given = "p lt acc 0.0; q gt other 0.0;", ["p", "q"][: spec.arity]
    if op == "where":
        before, given = "p lt acc 0.0;", ["p", "other", "acc"]
    steps = f"size abs acc; positive add size 0.5; small maximum acc -4.0; {before}"
    steps += f"v {op} {' '.join(given)};"
    if spec.boolean:
        steps, value = f"{steps} number where v acc other", "number"
    return parsed(dtype, "other:tile", steps, value)


def rotary(
    head: int,
    width: int | None = None,
    distance: int | None = None,
    dtype: str = "bfloat16",
    tables: str = "",
) -> EpilogueProgram:
    """A projection with a bias, behind a norm: ``width`` columns of each head are rotated, those
    ``distance`` apart together (None: all of them, halves of it)."""
    width, tables = width or head, tables or dtype
    return parsed(
        dtype,
        f"rstd:col:float32 bias:row bias_turned:row cos:table:{tables} sin:table:{tables}",
        f"scaled mul acc rstd; x add scaled bias; other swap acc {width} {distance or width // 2};"
        "other_scaled mul other rstd; turned add other_scaled bias_turned; x_cos mul x cos;"
        "turned_sin mul turned sin; y add x_cos turned_sin",
        "y",
        head=head,
    )


def heads(dtype: str = "bfloat16") -> dict[str, EpilogueProgram]:
    named = {
        **{name: program for name, program in kinds(dtype).items() if program.head},
        **{f"halves_{n}": rotary(n, dtype=dtype) for n in (64, 80, 96, 128, 256)},
        "neighbours_in_part": rotary(128, 64, 1, dtype=dtype),  # GPT-J
        "part_of_64": rotary(64, 16, dtype=dtype),  # Pythia
        "part_of_80": rotary(80, 32, dtype=dtype),  # Phi
        "everything": parsed(  # two swaps beside each kind of operand
            dtype,
            "scale:scalar:float32 bias:row residual:tile table:table:float32",
            "scaled mul acc scale; x add scaled bias; size abs x; log log1p size;"
            "half swap acc 64.0 32.0; next swap acc 32.0 1.0; both add half next;"
            "rated mul both log; later add rated residual; y mul later table",
            "y x", head=64,
        ),
    }  # fmt: skip
    return {name: legal(program) for name, program in named.items()}


def activated() -> EpilogueProgram:
    """A projection of whose activation the maxima of columns are wanted."""
    steps = "y0 mul acc inv_a; y mul y0 inv_b; r relu y; size abs r"
    stores, reduces = "r:bfloat16", "left:size:col:max"
    return parsed("float32", "inv_a:scalar inv_b:scalar", steps, stores, reduces, a_dtype=E4M3)


def fp8() -> dict[str, EpilogueProgram]:
    """A Llama layer in torchao's rowwise recipe, with maxima for the next quantization."""
    named = {
        # Attention output and down projection: residual and norm's operand out, its sum of squares
        # and its maximum, one a row.
        "fp8_residual": parsed(
            "bfloat16", "inv_a:col:float32 inv_b:row:float32 res:tile gamma:row:float32",
            "y0 mul acc inv_a; y mul y0 inv_b; x add y res; h mul x gamma; sq mul x x; size abs h",
            "x h", "squares:sq top:size:row:max", a_dtype=E4M3,
        ),
        # Gate and up, whose operand is shared.
        "fp8_swiglu": parsed(
            "bfloat16", "inv_a:col:float32 inv_g:row:float32 inv_u:row:float32",
            f"g0 mul acc0 inv_a; g mul g0 inv_g; u0 mul acc1 inv_a; u mul u0 inv_u; {_GATED};"
            "size abs y",
            "y g u", "top:size:row:max", accs=("acc0", "acc1"), a_dtype=E4M3,
        ),
        # Down's dgrad, of a gradient in e5m2, with the activation that the weight's gradient reads.
        "fp8_dswiglu": parsed(
            "bfloat16", "inv_a:col:float32 inv_b:scalar:float32 g:tile u:tile",
            "d0 mul acc inv_a; d mul d0 inv_b; s sigmoid g; act mul g s; du mul d act;"
            f"{_SLOPE}; through mul d u; dg mul through slope; gsize abs dg; usize abs du;"
            "y mul act u",
            "dg du y",
            "grow:gsize:row:max urow:usize:row:max gcol:gsize:col:max ucol:usize:col:max",
            a_dtype=E5M2, b_dtype=E4M3,
        ),
        "fp8_activated": activated(),
    }  # fmt: skip
    fast = ("fp8_residual", "fp8_swiglu", "fp8_dswiglu")
    named |= {f"{name}_fast": dataclasses.replace(named[name], fast=True) for name in fast}
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
    batch: int = 1,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Random (as_, bs, operands) for ``program``; products of order one. Of a program with heads
    ``n`` is rounded up to whole ones. ``integers``: small ones, of which every sum is exact.
    ``terms``: how many products the accumulator is the sum of. ``batch``: parts of the rows."""

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
        b = b if integers else (b.float() / k**0.5).to(b.dtype)  # nothing is computed in FP8
        bs.append(b.t() if b_major == "k" else b)
    shapes = {"tile": (m, n), "row": (n,), "col": (m,), "scalar": (), "table": (m, program.head)}
    shapes["batch"] = (batch, n)
    operands = [randn(*shapes[o.kind], dtype=o.dtype) for o in program.operands]
    if program.paired:  # its rows are (2N,), every value twice
        operands = [
            x.repeat_interleave(2, -1) if o.kind in ("row", "batch") else x
            for o, x in zip(program.operands, operands, strict=True)
        ]
    return as_, bs, operands
