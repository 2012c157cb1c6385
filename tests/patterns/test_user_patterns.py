# SPDX-License-Identifier: Apache-2.0
"""A user's pattern end to end: it fires, is the same function, trains, refuses, makes a kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, check, check_gradients, randn, reasons
from gates import (
    HIDDEN,
    MISH,
    SWISH,
    D,
    mish,
    mish_spelled_out,
    model,
    swish,
    write,
)

from coda_inductor import patterns

#: A process for each file would take seconds.
pytestmark = pytest.mark.usefixtures("prove_here")


def load(path: str):
    (pattern,) = patterns.load_file(path)
    return pattern


def raised(harness, pattern) -> list[torch.fx.Node]:
    return [n for n in harness.raised.nodes if n.target is pattern.op]


@pytest.mark.parametrize(
    ("text", "gate", "layers"),
    [(MISH, mish, 3), (SWISH, swish, 2)],
    ids=["mish", "swish"],
)
def test_gate_fires_once_a_layer_and_is_the_same_function(text, gate, layers, tmp_path):
    path = write(tmp_path, text)
    pattern = load(path)
    harness = check(model(gate, layers), randn(2, 3, D), patterns=[path])
    assert len(raised(harness, pattern)) == layers
    assert harness.counts[pattern.name] == layers
    assert harness.counts["rms_norm"] == layers - 1  # the first input is made by no GEMM
    paired = [site for site in harness.fused if site.program.paired]
    assert len(paired) == layers  # gate and up in one kernel, which stores the product alone
    assert all(len(site.program.stores) == 1 for site in paired)
    assert not any("coda_inductor." in str(op) and "gemm_" not in op for op in harness.ops())


@pytest.mark.parametrize(
    ("text", "gate", "layers", "dtype"),
    [
        (MISH, mish_spelled_out, 3, torch.float64),
        (SWISH, swish, 2, torch.float64),
        (MISH, mish, 2, torch.bfloat16),
    ],
    ids=["mish", "swish", "half precision"],
)
def test_gate_trains(text, gate, layers, dtype, tmp_path):
    """Gradients equal eager's, and happen in the epilogue that makes them; only what the
    GEMMs made is kept."""
    path = write(tmp_path, text)
    pattern = load(path)
    harness = check_gradients(
        model(gate, layers, dtype), randn(2, 3, D, dtype=dtype), patterns=[path]
    )
    assert harness.counts[pattern.name] == layers
    assert harness.counts[f"{pattern.name}_backward"] == layers
    activations = [n for n in harness.saved if n.meta["val"].shape[-1] == HIDDEN and "mm" in n.name]
    assert len(activations) <= 2 * layers


def backward_of(pattern):
    return getattr(torch.ops.coda_inductor, f"{pattern.op.__name__.split('.')[0]}_backward").default


def test_gradients_have_memory_of_their_own_or_are_empty(tmp_path):
    """Also one that is the incoming one; empty are those that are not needed."""
    text = MISH.replace("F.mish(gate) * up", "gate + up").replace(", spelled_out", ",")
    backward = backward_of(load(write(tmp_path, text)))
    dy, gate, up = (randn(3, 4) for _ in range(3))
    found = backward(dy, gate, up, [True, True])
    assert_same(found, (dy, dy))
    assert len({t.data_ptr() for t in (dy, *found)}) == 3
    assert_same(backward(dy, gate, up, [False, True]), (gate.new_empty(0), dy))
    assert backward(dy, gate, up, [False, False])[0].numel() == 0


def test_reason_of_a_condition_is_a_refusal(tmp_path):
    """A text of the user's becomes one; conditions of ours come first, and say what can be done."""
    extra = 'idioms=(mish_glu, spelled_out), conditions=(lambda m: "not today",)'
    path = write(tmp_path, MISH.replace("idioms=(mish_glu, spelled_out)", extra))
    harness = check(mish, randn(4, D), randn(4, D), patterns=[path])
    (found,) = (r for r in harness.report.refusals if r.what == "mish_glu")
    assert (found.code, found.text) == ("condition", "not today")
    assert "mish_glu at mul: not today" in reasons(harness)
    harness = check(mish, randn(4, D), randn(4, 1), patterns=[path])
    assert "differ in shape" in reasons(harness)
    harness = check(lambda g, u: F.silu(g) * u[..., :1], randn(4, D), randn(4, D))
    (found,) = (r for r in harness.report.refusals if r.what == "swiglu")
    assert (found.code, found.remedy.possible) == ("gate-shape", True)


REFUSED = {
    "not floating": (
        lambda g, u: F.mish(g) * u.to(torch.int64), MISH, "up is torch.int64, not a floating type",
    ),
    "a number": (lambda g, u: F.mish(g) * 2.0, MISH, "up is not a tensor"),
    "a tensor": (
        lambda g, u: g * torch.sigmoid(u * g) * u, SWISH, "beta is not a constant",
    ),
    "used elsewhere": (
        lambda g, u: (s := F.mish(g)) * u + s, MISH, "its intermediate s is used elsewhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_gate_stays(name, tmp_path):
    function, text, reason = REFUSED[name]
    path = write(tmp_path, text)
    harness = check(function, randn(4, D), randn(4, D), patterns=[path])
    assert not raised(harness, load(path))
    assert reason in reasons(harness)


def test_number_that_torch_makes_a_symbol_is_known(tmp_path):
    """A regression: with dynamic shapes Dynamo records a symbol for a module's float."""

    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.beta = 1.7

        def forward(self, g, u):
            return g * torch.sigmoid(self.beta * g) * u

    path = write(tmp_path, SWISH)
    harness = check(Gate(), randn(4, D), randn(4, D), dynamic=True, patterns=[path])
    assert len(raised(harness, load(path))) == 1


def test_mixed_dtypes_are_computed_in_the_wider_one(tmp_path):
    """The matcher looks through the cast; the op must not compute the gate in half precision."""
    path = write(tmp_path, MISH)
    gate = randn(4, D, dtype=torch.bfloat16).requires_grad_()
    up = randn(4, D, dtype=torch.float32).requires_grad_()
    harness = check_gradients(lambda g, u: F.mish(g.float()) * u, gate, up, patterns=[path])
    assert len(raised(harness, load(path))) == 1


def test_condition_that_fails_costs_its_own_pattern_only(tmp_path, caplog):
    extra = "idioms=(mish_glu, spelled_out), conditions=(lambda m: 1 / 0,)"
    path = write(tmp_path, MISH.replace("idioms=(mish_glu, spelled_out)", extra))

    def function(x, g, u):
        return mish(g, u) + F.silu(x) * u

    with caplog.at_level("WARNING"):
        harness = check(function, randn(4, D), randn(4, D), randn(4, D), patterns=[path])
    assert not raised(harness, load(path))
    assert raised(harness, next(p for p in patterns.load() if p.name == "swiglu")) != []
    assert "the pattern itself failed: ZeroDivisionError" in reasons(harness)
    assert "pattern mish_glu" in caplog.text
