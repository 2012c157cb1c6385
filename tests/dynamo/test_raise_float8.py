# SPDX-License-Identifier: Apache-2.0
"""Eight-bit floats near idioms, and patterns that fail: what else is there is raised."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, raised, reasons, swiglu
from harness import Harness

from coda_inductor import log
from coda_inductor.matching import Idiom
from coda_inductor.semantic.norms import rms_norm

D = 16
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.fixture
def warnings(caplog):
    """What our logger has warned of so far."""
    log.forget_warnings()
    yield lambda: [r.getMessage() for r in caplog.records if r.name == log.logger.name]
    log.forget_warnings()


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_inputs_in_float8(dtype, warnings):
    def function(x, gate, up):
        up = up.to(torch.bfloat16)
        y = F.silu(gate.to(torch.bfloat16)) * up
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y, F.rms_norm(y, (D,), None, 1e-5), h

    gate, up = bf16(3, D).to(dtype), bf16(3, D).to(dtype)
    harness = check(function, bf16(3, D).to(dtype), gate, up)
    assert raised(harness, swiglu) == 1
    assert raised(harness, rms_norm) == 2
    assert not warnings()


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_quantizing_inside_an_idiom_is_no_rounding(dtype):
    """Other casts are looked through; this one changes the result by percents."""

    def function(x, up):
        gate = F.silu(x).to(dtype).to(torch.bfloat16)
        h = (x * x).to(dtype).to(torch.bfloat16)
        return gate * up, x * torch.rsqrt(h.mean(-1, keepdim=True) + 1e-5)

    harness = check(function, bf16(3, D), bf16(3, D), tolerance=0)
    assert raised(harness, swiglu) == raised(harness, rms_norm) == 0


def test_a_matcher_that_fails_costs_one_match(monkeypatch, warnings):
    def function(x, y):
        a = F.silu(x) * y
        b = F.rms_norm(a, (D,), None, 1e-5)
        return F.silu(b) * x

    def failing(self, root):
        if "silu" in str(self.root.all_input_nodes):
            failed.append(root)
            if len(failed) == 1:
                raise TypeError("Promotion for Float8 Types is not supported")
        return found(self, root)

    found, failed = Idiom.match, []
    monkeypatch.setattr(Idiom, "match", failing)
    harness = Harness()
    x, y = bf16(3, D), bf16(3, D)
    torch.testing.assert_close(harness.run(function, x, y), function(x, y))
    assert raised(harness, rms_norm) == 1
    assert raised(harness, swiglu) == 1
    assert "the pattern itself failed: TypeError" in reasons(harness)
    (warning,) = warnings()
    assert "pattern swiglu" in warning
