# SPDX-License-Identifier: Apache-2.0
"""The real backend on a GPU: kernels in the graph, errors beside torch.compile's own, fallbacks."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from layers import compiled, either_order, errors, make
from torch import nn

import coda_inductor
from coda_inductor.errors import FallbackError
from coda_inductor.mainloop import availability
from coda_inductor.runtime import pool

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


def inputs(rows: int, dtype=torch.bfloat16, d: int = 256):
    return [torch.randn(1, rows, d, device="cuda").to(dtype) for _ in range(2)]


def assert_as_good(model, ours, xs) -> None:
    """Our error to fp32 is at most that of torch.compile or of eager, whichever is larger, times
    1.2 of measurement slack. Eager counts because it rounds the residual stream between its GEMMs,
    as we do; torch.compile recomputes it in so small a model."""
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(*[x.float() for x in xs])
        theirs = errors(torch.compile(copy.deepcopy(model))(*xs), exact)
        eager = errors(model(*xs), exact)
        mine = errors(ours(*xs), exact)
    for mine_, theirs_, eager_ in zip(mine, theirs, eager, strict=True):
        assert 0 < mine_ <= 1.2 * max(theirs_, eager_), (mine, theirs, eager)


@pytest.mark.parametrize("rows", [1, 7, 127, 1024, 8191])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_no_worse_than_torch_compiles(rows, dtype):
    model = make(dtype)
    assert_as_good(model, compiled(model, strict=True, fp16_norms=True), inputs(rows, dtype))
    assert {s.how for s in coda_inductor.reports()[-1].sites} == {"kernel"}


def test_biases_and_weights_in_either_order():
    model = make(bias=True)
    for _ in either_order(model):
        assert_as_good(model, compiled(model, strict=True), inputs(300))


def test_dynamic_rows_use_one_kernel():
    model = make()
    ours = torch.compile(model, backend="coda", dynamic=True, options={"gate": "always"})
    for rows in (64, 1000, 33):
        assert_as_good(model, ours, inputs(rows))
    assert len(coda_inductor.reports()) == 1


@pytest.mark.parametrize(
    "how",
    [{"options": {"triton.cudagraphs": True, "gate": "always"}}, {"mode": "reduce-overhead"}],
)
def test_cuda_graphs(how):
    model = make()
    ours = torch.compile(model, backend="coda", **how)
    xs = inputs(2048)
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            first = [t.clone() for t in ours(*xs)]
        xs = inputs(2048)
        torch.compiler.cudagraph_mark_step_begin()
        second = [t.clone() for t in ours(*xs)]
    assert not torch.equal(first[0], second[0])
    assert max(errors(second, model(*xs))) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_models_fall_back_with_one_warning(dtype, caplog):
    model, xs = make(dtype), inputs(64, dtype)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "coda_inductor"):
        mine = compiled(model)(*xs)
    assert max(errors(mine, model(*xs))) < 1e-3  # torch's own TF32-free GEMMs
    assert [r.getMessage() for r in caplog.records if "float" in r.getMessage()]
    assert not any(site.fused for site in coda_inductor.reports()[-1].sites)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"FallbackError(.|\n)*no kernel"):
        compiled(model, strict=True)(*xs)


def test_odd_width_falls_back_alone():
    model = nn.Sequential(nn.Linear(256, 257), nn.GELU(), nn.Linear(257, 256)).cuda().bfloat16()
    x = torch.randn(512, 256, device="cuda").bfloat16()
    with torch.no_grad():
        assert max(errors([compiled(model)(x)], [model(x)])) < 1e-2
    assert all("multiples of 8" in site.reason for site in coda_inductor.reports()[-1].sites)


def test_without_a_kernel_stack_the_model_runs(monkeypatch):
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: "quack-kernels is not installed")
    model, xs = make(), inputs(256)
    assert_as_good(model, compiled(model), xs)
    assert not any(site.fused for site in coda_inductor.reports()[-1].sites)


def test_kernel_that_does_not_compile_is_expanded_for_inductor(monkeypatch, caplog):
    monkeypatch.setattr(pool, "wait", lambda requests: dict.fromkeys(requests, "no luck"))
    model, xs = make(), inputs(256)
    with caplog.at_level(logging.WARNING, "coda_inductor"):
        assert_as_good(model, compiled(model), xs)
    assert "no luck" in caplog.text
    assert {s.how for s in coda_inductor.reports()[-1].sites} == {"reference"}
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=FallbackError.__name__):
        compiled(model, strict=True)(*xs)


def test_second_process_finds_its_kernels(tmp_path, monkeypatch):
    """What one process compiled, the next loads: its requests are ready without compiling."""
    model, xs = make(), inputs(512)
    with torch.no_grad():
        compiled(model, strict=True)(*xs)
    assert pool.submit([_request(site) for site in coda_inductor.reports()[-1].sites]) == 0


def _request(site) -> pool.KernelRequest:
    return pool.KernelRequest(site.program.to_json(), site.config)


def test_gate_leaves_small_models_to_inductor():
    model, xs = make(), inputs(16)
    ours = torch.compile(model, backend="coda")
    with torch.no_grad():
        assert max(errors(ours(*xs), model(*xs))) < 1e-2
    reasons = {site.reason for site in coda_inductor.reports()[-1].sites}
    assert all("too small" in reason for reason in reasons), reasons
