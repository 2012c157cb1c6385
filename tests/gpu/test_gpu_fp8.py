# SPDX-License-Identifier: Apache-2.0
"""FP8 kernels on a GPU: held to twice the error of ``_scaled_mm`` and the unfused ops, against
float64 of the numbers that the operands hold; NaN and inf where torch has them."""

import dataclasses
import math

import pytest
import torch
from oracle import ARCH, NEEDS_KERNELS, combined, config_for, launched
from programs import fp8, inputs

from coda_inductor.program import Store, reference
from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.site import Site
from coda_inductor.tune.inputs import tensors

pytestmark = NEEDS_KERNELS

N, K = 272, 208  # ragged for every tile: multiples of 16
NAMES = [name for name, program in fp8().items() if Site(program, N, N, K).refusal is None]


def check(program, as_, bs, operands, config=None):
    """Run the op; its errors to float64 are twice the unfused ones', NaN where those are."""
    got = launched(as_, bs, operands, program, config or config_for(program))
    unrounded = tuple(dataclasses.replace(s, dtype="float64") for s in program.stores)
    exactly = dataclasses.replace(program, stores=unrounded)
    wide = reference.run(exactly, [a.double() for a in as_], [b.double() for b in bs], operands)
    plain = reference.run(program, as_, bs, operands, exact=False)
    for spec, x, y, z in zip(
        program.outputs, *(combined(program, each) for each in (got, wide, plain)), strict=True
    ):
        assert torch.equal(x.isnan(), z.isnan()), spec
        assert torch.equal(x.isinf(), z.isinf()), spec
        fine = y.isfinite() & z.isfinite()
        if not fine.any():
            continue
        x, y, z = (each[fine] for each in (x, y, z))  # noqa: PLW2901 (the same, where they are)
        error, allowed = (x - y).abs().max(), 2 * (z - y).abs().max()
        # One number may be lucky: of a single row, or a maximum, which is rounded as its store is.
        noise = 1e-5 if isinstance(spec, Store) else 2.0**-8
        assert error <= allowed + noise * y.abs().max() + 1e-6, spec
    return got


@pytest.mark.parametrize("name", NAMES)
def test_program(name):
    """Also a small product, of which every fourth column was zero (pytorch/pytorch 188841)."""
    program = fp8()[name]
    for m, n, k in ((1, N, K), (8191, N, K), (16, 16, 32)):
        check(program, *inputs(program, m, n, k, device="cuda"))
    arguments = inputs(program, 1000, 528, 192, device="cuda")
    for config in legal_configs(program, ARCH)[1::7]:
        check(program, *arguments, config)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_nan_inf_and_zero(name):
    """An operand of NaN, a scale of NaN or inf, rows of zeros: as the unfused ops have them. A
    maximum of values of which one is NaN is NaN."""
    program = fp8()[name]
    (a,), bs, operands = inputs(program, 200, N, K, device="cuda")
    a = a.float()
    a[3, 5] = math.nan
    a[7] = 0
    a = a.to(getattr(torch, program.a_dtype))
    for operand, x in zip(program.operands, operands, strict=True):
        if operand.kind == "col":
            x[11], x[13], x[17] = math.nan, math.inf, 0.0
    check(program, [a], bs, operands)


def test_the_two_accumulations_differ():
    """Else one is not what it says; the slow one, in small tiles, is nearer to float64."""
    slow, fast = (fp8()[name] for name in ("fp8_residual", "fp8_residual_fast"))
    as_, bs, operands = tensors(Site(slow, 1024, 512, 8192), "cuda")
    operands[[o.name for o in slow.operands].index("res")].zero_()
    wide = reference.run(slow, [as_[0].double()], [bs[0].double()], operands)[0].double()
    tiles = ((slow, config_for(slow)), (fast, Config.parse("128x256:2x1:co")))
    found = [launched(as_, bs, operands, program, config)[0] for program, config in tiles]
    errors = [(x.double() - wide).square().mean().item() for x in found]
    assert errors[0] < errors[1]
