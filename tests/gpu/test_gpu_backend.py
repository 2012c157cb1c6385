# SPDX-License-Identifier: Apache-2.0
"""The real backend on a GPU: kernels in the graph, errors beside torch.compile's own, fallbacks."""

from __future__ import annotations

import logging

import pytest
import torch
from layers import assert_as_good, compiled, errors, make

import coda_inductor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh", "inference")]


@pytest.fixture
def inference():
    with torch.no_grad():
        yield


def inputs(rows: int, dtype=torch.bfloat16, d: int = 256):
    return [torch.randn(1, rows, d, device="cuda").to(dtype) for _ in range(2)]


@pytest.mark.parametrize("rows", [1, 7, 127, 1024, 8191])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_worse_than_torch_compiles(rows, dtype):
    model = make(dtype)
    assert_as_good(model, compiled(model, strict=True, fp16_norms=True), inputs(rows, dtype))
    assert {s.how for s in coda_inductor.reports()[-1].sites} == {"kernel"}


def test_wide_models_fall_back_with_one_warning(caplog):
    dtype = torch.float32
    model, xs = make(dtype), inputs(64, dtype)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "coda_inductor"):
        mine = compiled(model)(*xs)
    assert max(errors(mine, model(*xs))) < 1e-3  # torch's own TF32-free GEMMs
    assert [r.getMessage() for r in caplog.records if "float" in r.getMessage()]
    assert not any(site.fused for site in coda_inductor.reports()[-1].sites)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"FallbackError(.|\n)*no kernel"):
        compiled(model, strict=True)(*xs)
