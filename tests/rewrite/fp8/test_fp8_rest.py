# SPDX-License-Identifier: Apache-2.0
"""Unfused products are given their scales where cuBLAS takes them."""

from __future__ import annotations

import pytest
import torch
from float8 import needs_scaled_mm
from passes import aten_graph

from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.rewrite.fp8 import rest
from coda_inductor.semantic.fp8 import scaled_mm, scaled_mm_definition

M, N, K = 32, 48, 64
HALF = torch.bfloat16


def operands():
    a, b = (torch.randn(*shape).to(torch.float8_e4m3fn) for shape in ((M, K), (N, K)))
    return a, b.t(), torch.rand(M, 1) + 0.5, torch.rand(1, N) + 0.5


def rewritten(monkeypatch, *, out=HALF, after=True, cublas=True, no_kernels=None):
    """Is the product multiplied after it, when the pass has run?"""
    monkeypatch.setattr(availability, "scales_vectors", lambda _: cublas)
    graph = aten_graph(lambda a, b, x, y: scaled_mm(a, b, x, y, out, False, after), *operands())
    record = Record(parse(None, {}), "test")
    record.plan = Plan(record.options, no_kernels=no_kernels, on_gpu=True)
    rest.finish_fp8(graph, record)
    (node,) = graph.find_nodes(op="call_function", target=scaled_mm)
    return node.args[6]


def test_a_product_is_given_its_scales(monkeypatch):
    assert rewritten(monkeypatch) is False


@pytest.mark.parametrize(
    "how",
    [{"out": torch.float32}, {"cublas": False}, {"no_kernels": refuse("no-cuda", "no GPU")}],
    ids=["dtype", "another GPU", "no kernels"],
)
def test_else_it_stays_torchaos(monkeypatch, how):
    assert rewritten(monkeypatch, **how) is True


def test_it_is_rounded_once():
    needs_scaled_mm()
    a, b, inv_a, inv_b = operands()
    exact = (a.double() @ b.double()) * inv_a * inv_b
    once, twice = (
        (scaled_mm_definition(a, b, inv_a, inv_b, HALF, False, after).double() - exact).norm()
        for after in (False, True)
    )
    assert once < twice


@pytest.mark.parametrize(
    ("cuda", "capability", "known"),
    [("12.9", 9, True), ("12.8", 9, False), ("13.0", 10, False), (None, 9, False)],
)
def test_which_gpus_scale(monkeypatch, cuda, capability, known):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    assert availability.scales_vectors(torch.device("cuda", 0)) is known
    assert not availability.scales_vectors(torch.device("cpu"))
