# SPDX-License-Identifier: Apache-2.0
"""torchao's FP8 inference with kernels: as exact as torch.compile, NaN and inf where it has."""

import copy

import pytest
import torch
from oracle import NEEDS_KERNELS
from zoo.float8 import D, Stack, serve

import coda_inductor

pytestmark = [*NEEDS_KERNELS, pytest.mark.usefixtures("no_fallbacks")]
EVERY = ("row", "tensor", "static")
HOW = {"gate": "always", "strict": True}
LAYERS = 2


def batch(rows: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, rows, D, device="cuda").bfloat16()


def plain(**how) -> torch.nn.Module:
    torch.manual_seed(0)
    return Stack(layers=LAYERS, **how).cuda().bfloat16()


def run(model, x, backend, options=None):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, backend=backend, options=options)(x)


@pytest.mark.parametrize("rows", [1, 127])
@pytest.mark.parametrize("how", EVERY)
def test_it_is_as_exact_as_torch_compile(how, rows):
    x = batch(rows)
    x[:, ::4, 5] *= 100
    model = plain(bias=rows == 127)
    with torch.no_grad():
        want = copy.deepcopy(model).float()(x.float())
    model = serve(model, how, x)
    theirs = run(model, x, "inductor")
    ours = run(model, x, "coda", HOW)
    assert coda_inductor.reports()[-1].kernels == 2 * LAYERS
    errors = [(y.float() - want).norm().item() for y in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("how", EVERY)
def test_rows_of_what_has_no_scale(how, value):
    x = batch(200)
    model = serve(plain(), how, x)
    x[0, 3] = value
    theirs, ours = run(model, x, "inductor"), run(model, x, "coda", HOW)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
