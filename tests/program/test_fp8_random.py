# SPDX-License-Identifier: Apache-2.0
"""Random FP8 programs against float64: the reference executor, its two roundings, and what the
fuser does to a program before it is one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from coda_inductor.program import (
    EpilogueProgram,
    Operand,
    Reduce,
    Step,
    Store,
    consistent,
    reference,
    simplify,
    verify,
)
from coda_inductor.program.dtypes import FP8
from coda_inductor.program.scales import scaled

#: Ops under which an error grows by a small factor at most, on values of order one.
_UNARY = ("neg", "abs", "sigmoid", "tanh", "relu", "cos")
_BINARY = ("add", "sub", "mul", "maximum", "minimum")
M, N, K = 32, 48, 64


def program_of(chance: random.Random) -> EpilogueProgram:
    """A product with its scales and up to eight steps, two stores and a reduction of each kind."""
    paired = chance.random() < 0.3
    accs = ("acc0", "acc1") if paired else ("acc",)
    kinds = ["col", "row", "scalar"] + ([] if paired else ["tile"])
    operands = [Operand("inv", chance.choice(("col", "row", "scalar")), "float32")]
    for i in range(chance.randint(0, 3)):
        kind = chance.choice(kinds)
        operands.append(Operand(f"o{i}", kind, chance.choice(("float32", "bfloat16"))))
    steps = [Step(f"y{i}", "mul", (acc, "inv")) for i, acc in enumerate(accs)]
    values = [step.name for step in steps]
    for i in range(chance.randint(1, 8)):
        near = [*values[-3:], *(o.name for o in operands[1:])]
        if chance.random() < 0.4:
            step = Step(f"v{i}", chance.choice(_UNARY), (values[-1],))
        else:
            step = Step(f"v{i}", chance.choice(_BINARY), (values[-1], chance.choice([*near, 0.5])))
        low = Step(f"l{i}", "minimum", (step.name, 8.0))
        steps += [step, low, Step(f"b{i}", "maximum", (low.name, -8.0))]
        values.append(f"b{i}")
    dtypes = ("bfloat16", "float32", *FP8)
    stored = list(dict.fromkeys([values[-1], chance.choice(values)]))
    steps.append(Step("size", "abs", (values[-1],)))
    return EpilogueProgram(
        accs,
        chance.choice(FP8),
        tuple(operands),
        tuple(steps),
        tuple(Store(f"out{i}", value, chance.choice(dtypes)) for i, value in enumerate(stored)),
        (
            Reduce("top", "size", "row", "max"),
            Reduce("left", "size", "col", "max"),
            Reduce("total", values[-1], chance.choice(("row", "col"))),
        ),
        chance.choice(FP8),
        chance.random() < 0.5,
    )


def tensors_of(program: EpilogueProgram):
    def made(*shape, dtype, scale=1.0):
        return (torch.randn(shape) * scale).to(getattr(torch, dtype))

    a = made(M, K, dtype=program.a_dtype)
    bs = [made(N, K, dtype=program.b_dtype).t() for _ in program.accs]
    shapes = {"tile": (M, N), "row": (N,), "col": (M,), "scalar": ()}
    operands = [made(*shapes[o.kind], dtype=o.dtype) for o in program.operands]
    operands[0] = operands[0].abs() / 8  # products of order one
    if program.paired:
        operands = [
            x.repeat_interleave(2) if o.kind == "row" else x
            for o, x in zip(program.operands, operands, strict=True)
        ]
    return a, bs, operands


#: Of a dtype: the spacing of its numbers around one.
_STEP = {"float32": 2.0**-20, "bfloat16": 2.0**-8, FP8[0]: 2.0**-3, FP8[1]: 2.0**-2}


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_is_float64s_within_the_rounding_of_its_stores(seed):
    torch.manual_seed(seed)
    raw = program_of(random.Random(seed))  # noqa: S311 (programs to test, no secret)
    program = verify(simplify(consistent(raw)))
    assert EpilogueProgram.from_json(program.to_json()) == program
    a, bs, operands = tensors_of(program)
    found = reference.run(program, [a], bs, operands)
    # Without any rounding on the way: of the program as it was before it was made consistent.
    unrounded = tuple(replace(store, dtype="float64") for store in raw.stores)
    wide = replace(raw, a_dtype="float64", b_dtype="float64", fast=False, stores=unrounded)
    exact = reference.run(wide, [a.double()], [b.double() for b in bs], operands)
    plain = reference.run(program, [a], bs, operands, exact=False)
    coarsest = max(_STEP[store.dtype] for store in program.stores)
    for spec, x, y, z in zip(program.outputs, found, exact, plain, strict=True):
        step = _STEP[spec.dtype] if isinstance(spec, Store) else coarsest
        allowed = step * (y.abs() + 1) + 1e-5 * y.abs().max()
        if isinstance(spec, Reduce):
            allowed = allowed * (1 if spec.combine == "max" else N) + coarsest * y.abs().max()
        assert ((x.double() - y).abs() <= allowed).all()
        assert z.shape == x.shape
    chains = scaled(program)
    assert all(chains[acc].names == ("inv",) for acc in program.accs) or len(operands) > 1
