# SPDX-License-Identifier: Apache-2.0
"""What an epilogue's work costs: the measured cases of docs/gotchas.md, in order and size."""

from __future__ import annotations

import dataclasses

import pytest

from coda_inductor.program import EpilogueProgram, Operand, Reduce, Step, Store
from coda_inductor.select.choice import choose, select
from coda_inductor.select.config import Config
from coda_inductor.select.device import H100
from coda_inductor.select.instructions import extra_us, weight
from coda_inductor.select.kinds import kinds
from coda_inductor.select.model import kernel_us
from coda_inductor.select.site import Site

PLAIN = EpilogueProgram(("acc",), "bfloat16", stores=(Store("out0", "acc", "bfloat16"),))
SHAPE = (8192, 5120, 1280)
ELEMENTS = SHAPE[0] * SHAPE[1]
CONFIG = Config.parse("128x256:2x1:co")


def chain(op: str, times: int, *args: float) -> EpilogueProgram:
    """``op`` applied again and again."""
    names = ["acc", *(f"v{i}" for i in range(times))]
    steps = tuple(Step(names[i + 1], op, (names[i], *args)) for i in range(times))
    stores = (Store("out0", names[-1], "bfloat16"),)
    return dataclasses.replace(PLAIN, steps=steps, stores=stores)


#: Program -> microseconds that it took more than the plain product with ``CONFIG``, measured.
MEASURED = {
    "mul": (chain("mul", 32, 1.001), 40),
    "exp": (chain("exp", 4), 33),
    "rsqrt": (chain("rsqrt", 4), 33),
    "tanh": (chain("tanh", 4), 78),
    "sigmoid": (chain("sigmoid", 4), 76),
    "log1p": (chain("log1p", 4), 125),
    "expm1": (chain("expm1", 4), 64),
}


@pytest.mark.parametrize("name", MEASURED)
def test_work_costs_about_what_was_measured(name):
    program, us = MEASURED[name]
    assert extra_us(program, PLAIN, CONFIG, ELEMENTS, H100) == pytest.approx(us, rel=0.75)


def heavy() -> EpilogueProgram:
    """The gradient of a gelu with four reductions, as LayerNorm's backward pass wants it."""
    act = kinds()["act_bwd"]
    vectors = tuple(Operand(f"w{i}", "row", "float32") for i in range(3))
    steps = tuple(Step(f"p{i}", "mul", ("dz", f"w{i}")) for i in range(3))
    reduces = tuple(Reduce(f"part{i}", f"p{i % 3}", "row" if i < 2 else "col") for i in range(4))
    return dataclasses.replace(
        act, operands=act.operands + vectors, steps=act.steps + steps, reduces=reduces
    )


def test_code_that_the_instruction_cache_does_not_hold_is_dear():
    """Measured of such a program: 351 us with 128 accumulators a thread, 1555 us with 192."""
    program = heavy()
    small, large = (
        kernel_us(program, Config.parse(c), *SHAPE) for c in ("128x128:2x1:pp", "128x192:2x1:pp")
    )
    assert large > 2.5 * small
    config = choose(program, *SHAPE)
    assert config.tile_m * config.tile_n <= 128 * 128 * (1 if config.pingpong else 2)


def test_a_lighter_program_is_no_cheaper_than_the_kind_it_is_like():
    assert extra_us(PLAIN, heavy(), CONFIG, ELEMENTS, H100) == 0.0


def test_the_gate_counts_the_work():
    """The same traffic, but far more to compute than cuBLAS and a kernel would lose by moving it:
    a regression, a user's gate with mish took 10.7 ms a step where torch.compile took 8.3."""
    light, endless = chain("mul", 1, 2.0), chain("sin", 40)
    assert select(Site(light, *SHAPE), gated=True).refusal is None
    assert "us fused" in select(Site(endless, *SHAPE), gated=True).refusal.text


def test_every_op_weighs_something():
    from coda_inductor.program.ops import OPS

    for name, spec in OPS.items():
        step = Step("v0", name, ("acc",) * spec.arity)
        multiplications, instructions = weight(dataclasses.replace(PLAIN, steps=(step,)))
        assert (multiplications, instructions) >= (3.0, 2.5), name
