# SPDX-License-Identifier: Apache-2.0
"""A graph that Inductor cannot compile runs op by op, with one warning."""

import contextlib
import copy

import pytest
import torch
from checking import leave_custom_ops
from torch import nn
from torch._inductor import compile_fx as inductor
from torch._inductor.exc import InductorError
from torch.utils.checkpoint import checkpoint
from zoo.layers import D, whole

import coda_inductor
from coda_inductor import op_by_op
from coda_inductor.mainloop import availability
from coda_inductor.plan import Plan
from coda_inductor.runtime import pool

pytestmark = pytest.mark.usefixtures("without_code")


class Block(nn.Module):
    """With a buffer that is changed in place."""

    def __init__(self):
        super().__init__()
        self.inner = whole()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def test_a_kernel_that_was_not_compiled_keeps_the_graph_out_of_caches(monkeypatch):
    monkeypatch.setattr(Plan, "on_kernels", lambda *_: True)
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    monkeypatch.setattr(pool, "wait", lambda requests: dict.fromkeys(requests, "it took too long"))
    uncached = []

    @contextlib.contextmanager
    def no_caches():
        uncached.append(True)
        yield

    monkeypatch.setattr(op_by_op, "_no_caches", no_caches)
    model, x = Block().bfloat16(), torch.randn(5, D, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="coda", options={"gate": "always"})
    compiled(x).sum().backward()
    # The forward pass again, without its kernels; the backward pass at once, and again.
    assert len(uncached) == 3


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_kernel_that_fails_late_costs_its_site_alone(monkeypatch, part, warned):
    """Its call is plain ops for Inductor, as if that had been known from the start. Compiling a
    kernel takes as long as all that Inductor does: neither waits for the other."""
    happened, real = [], op_by_op.compile_fx_inner

    def compile_fx_inner(*args, **how):
        happened.append("Inductor")
        return real(*args, **how)

    def wait(requests, **_):
        happened.append("wait")
        mine = happened.count("wait") == (1 if part == "forward" else 2)
        return {r: "ptxas said no" if mine and r is requests[0] else None for r in requests}

    leave_custom_ops(monkeypatch)
    monkeypatch.setattr(op_by_op, "compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr(pool, "submit", lambda asked: happened.append("begin"))
    monkeypatch.setattr(pool, "wait", wait)
    coda_inductor.report.forget()
    model, x = Block().double(), torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    mine = x.detach().clone().requires_grad_()
    own = torch.compile(copy.deepcopy(model), backend="coda")
    own(mine).sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(mine.grad, x.grad)
    assert happened[:3] == ["begin", "Inductor", "wait"]
    (report,) = coda_inductor.reports()
    failed = [site for site in report.sites if "ptxas said no" in site.reason]
    assert [site.how for site in failed] == ["reference"]
    assert failed[0].role == ("forward" if part == "forward" else "input gradient")
    assert sum("ptxas said no" in said for said in warned()) == 1


def test_a_mask_that_is_drawn_again_is_the_same(monkeypatch):
    """One pass runs op by op, the other one is Inductor's code; both draw from one seed."""

    def compile_fx_inner(gm, inputs, **how):
        if not how.get("is_backward"):
            raise InductorError(RuntimeError("no such kernel"), None)
        return inductor.compile_fx_inner(gm, inputs, **how)

    monkeypatch.setattr(op_by_op, "compile_fx_inner", compile_fx_inner)
    linear = nn.Linear(D, D, bias=False).requires_grad_(False)
    nn.init.eye_(linear.weight)
    model, x = nn.Sequential(linear, nn.Dropout(), linear), torch.ones(8, D, requires_grad=True)
    y = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="coda")(x)
    y.sum().backward()
    assert torch.equal(y > 0, x.grad > 0)
    assert 0.2 < (y > 0).float().mean() < 0.8
