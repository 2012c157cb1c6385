# SPDX-License-Identifier: Apache-2.0
"""Sums of products as one GEMM, on a CPU: which terms are read in place, which are copied, and
which kernels a call may launch."""

from __future__ import annotations

import contextlib
import sys
import types

import pytest
import torch
from programs import inputs, kinds
from torch._subclasses.fake_tensor import FakeTensorMode

from coda_inductor.mainloop.readings import pair, reading_of
from coda_inductor.mainloop.tensors import UnpairableError
from coda_inductor.runtime import launch, op
from coda_inductor.runtime.launch import Kernel, requests
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.select.config import Config

CONFIG = Config(128, 128, 2, 1, True)
M, N, F = 40, 72, 64
PROGRAM = kinds()["norm_bwd"]


def terms(b_major: str = "n"):
    """(as_, bs), each two halves of one buffer with a gap, so that the order is known."""
    left = torch.randn(3 * M, F).bfloat16()
    right = torch.randn(3 * F, N).bfloat16()
    bs = [right[:F], right[2 * F :]]
    if b_major == "k":
        right = torch.randn(3 * N, F).bfloat16()
        bs = [right[:N].t(), right[2 * N :].t()]
    return [left[:M], left[2 * M :]], bs


READING = reading_of(PROGRAM, 2)


@pytest.mark.parametrize("b_major", ["n", "k"])
@pytest.mark.parametrize("a_order", [1, -1])
@pytest.mark.parametrize("b_order", [1, -1])
def test_terms_in_place_start_at_the_lower_addresses(b_major, a_order, b_order):
    as_, bs = terms(b_major)
    a, b, variant, distances = READING.bind(as_[::a_order], bs[::b_order])
    assert a is as_[0]
    assert b is bs[0]
    assert variant == ("straight" if a_order == b_order else "crossed")
    assert distances == (2 * M * F, 2 * F * N)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


REFUSED = {
    "three terms": (lambda a, b: ([*a, a[0]], [*b, b[0]]), "only two"),
    "unequal K": (lambda a, b: ([a[0], a[1][:, :32]], [b[0], b[1][:32]]), "differ in K"),
    "short K": (lambda a, b: ([x[:, :40] for x in a], [x[:40] for x in b]), "multiple of 64"),
    "another row stride": (
        lambda a, b: ([a[0], torch.randn(M, 2 * F).bfloat16()[:, :F]], b), "differ in strides",
    ),
    "majors that differ": (lambda a, b: (a, [b[0], b[1].t().contiguous().t()]), "in strides"),
    "m-major": (lambda a, b: ([x.t().contiguous().t() for x in a], b), "not K-major"),
    "no unit stride": (lambda a, b: (a, [strided(x) for x in b]), "no unit stride"),
    "odd rows": (
        lambda a, b: (a, [torch.randn(F, N + 4).bfloat16()[:, :N] for _ in b]), "16-byte rows",
    ),
    "dtypes": (lambda a, b: (a, [b[0], b[1].half()]), "one 16-bit dtype"),
    "float32": (lambda a, b: ([x.float() for x in a], [x.float() for x in b]), "16-bit dtype"),
    "one matrix twice": (lambda a, b: ([a[0], a[0]], b), "left operands are not a legal"),
    "an odd address": (
        lambda a, b: (a, [b[0], torch.randn(F * N + 4).bfloat16()[4:].view(F, N)]),
        "right operands are not a legal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_terms_that_cannot_be_read_in_place_say_why_and_are_copied(name):
    change, why = REFUSED[name]
    as_, bs = change(*terms())
    with pytest.raises(UnpairableError, match=why):
        READING.reads(as_, bs)(as_, bs)
    if len({x.dtype for x in (*as_, *bs)}) > 1:
        return
    a, b, *how = READING.bind(as_, bs)
    assert how == ["", ()]
    assert torch.equal(a, torch.cat(as_, 1))
    assert torch.equal(b, torch.cat(bs, 0))


def test_the_op_sums_the_terms():
    as_, bs, operands = inputs(PROGRAM, M, N, F, b_major="n", terms=2)
    dx, partials = gemm_epilogue(as_, bs, operands, PROGRAM, CONFIG)
    residual, x, weight, coef = (o.float() for o in operands)
    acc = sum(a.float() @ b.float() for a, b in zip(as_, bs, strict=True))
    expected = acc * weight + x * coef[:, None] + residual
    torch.testing.assert_close(dx.float(), expected, atol=0.03, rtol=0.01)
    torch.testing.assert_close(partials.sum(0), (acc * x).sum(0), atol=1e-3, rtol=1e-4)


def asked(as_, bs, program=PROGRAM):
    return [
        (r.a_major, r.b_major, r.variant) for r in requests(as_, bs, program.to_json(), str(CONFIG))
    ]


def test_requests_name_every_kernel_that_a_call_may_launch():
    with FakeTensorMode():
        a, at = torch.empty(M, F), torch.empty(F, M).t()
        b, w = torch.empty(F, N), torch.empty(N, F).t()
    a, at, b, w = (x.bfloat16() for x in (a, at, b, w))
    assert asked([a], [b]) == [("k", "n", "")]
    assert asked([a], [w]) == [("k", "k", "")]
    assert asked([at], [b]) == [("m", "n", "")]
    assert asked([a, a], [b, b]) == [
        ("k", "n", "straight"), ("k", "n", "crossed"),
    ]  # fmt: skip
    assert asked([a, a], [w, w])[1] == ("k", "k", "crossed")
    assert asked([a, at], [w, w]) == [("k", "n", "")]
    assert asked([a, a, a], [b, b, b]) == [("k", "n", "")]
    pair = asked([a], [w, w], kinds()["swiglu"])
    assert pair == [("k", "k", ""), ("k", "k", "swapped")]


@pytest.fixture
def built(monkeypatch):
    """How each kernel was asked for that a launch would have built; nothing is."""
    asked_for = []

    def build(program, config, a_major, b_major, variant, *, device):
        asked_for.append(variant)
        return "plan"

    build = types.SimpleNamespace(build=build)
    monkeypatch.setitem(sys.modules, "coda_inductor.mainloop.build", build)  # needs no library
    monkeypatch.setattr(launch, "_on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_quack_launcher", lambda: lambda *_: None)
    return asked_for


@pytest.mark.parametrize("paired", [False, True])
def test_both_orders_are_loaded_before_a_graph_is_captured(paired, built, monkeypatch):
    """Where activations lie is known at the call; while one is captured nothing can be loaded."""
    program = kinds()["swiglu"] if paired else PROGRAM
    as_, bs, operands = inputs(program, M, N, F, b_major="k" if paired else "n", terms=2 - paired)
    if paired:
        monkeypatch.setattr(pair, "foreign_view", lambda *_: bs[0])
    else:
        as_, bs = terms()
    kernel = Kernel(program, CONFIG)
    outputs = op._allocate(program, CONFIG, as_[0], bs)
    for left, right in ((as_, bs), (as_, bs[::-1]) if paired else (as_[::-1], bs)):
        kernel.launch(left, right, operands, outputs)
        assert sorted(built) == (["", "swapped"] if paired else ["crossed", "straight"])


def test_a_deterministic_sum_does_not_depend_on_addresses():
    """In place it starts with the term at the lower address."""
    as_, bs = terms()
    torch.use_deterministic_algorithms(True)
    try:
        for order in (slice(None), slice(None, None, -1)):
            left, right = as_[order], bs[order]
            a, b, *how = READING.bind(left, right)
            assert how == ["", ()]
            assert torch.equal(a, torch.cat(left, 1))
            assert torch.equal(b, torch.cat(right, 0))
        assert asked(as_, bs) == [("k", "n", "")]
    finally:
        torch.use_deterministic_algorithms(False)


def test_requests_leave_the_row_count_symbolic():
    seen = []

    def backend(graph, example_inputs):
        x, w = (t for t in example_inputs if isinstance(t, torch.Tensor))
        seen.append([r.variant for r in requests([x, x], [w, w], PROGRAM.to_json(), str(CONFIG))])
        return graph.forward

    run = torch.compile(lambda x, w: x @ w, backend=backend)
    for m in (M, M + 3):
        x, w = torch.randn(m, F).bfloat16(), torch.randn(F, N).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        run(x, w)
    assert seen == [["straight", "crossed"]]
