# SPDX-License-Identifier: Apache-2.0
"""The oracle sees what is planted: a wrong value, which is reduced, and any other difference."""

from dataclasses import replace

import fuzz_rounding
import pytest
import torch
from fuzz_oracle import differences, judge, run
from fuzz_program import Program
from fuzz_reduce import reduced
from harness import Harness

INPUTS = (("x", "randn(4, 8)"), ("w", "randn(8, 8)"), ("g", "1 + randn(8)"))
BODY = """\
a = F.rms_norm(x, (8,), g, 1e-3)
b = a @ w
with torch.autocast("cpu", enabled=False):
    c = torch.sin(b)
d = c * (1 + torch.relu(a))
return [a, d + b]"""


class Planted(Harness):
    """Takes every sine for a cosine."""

    def _rewrite(self, graph, record, **how):
        for node in graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default
        super()._rewrite(graph, record, **how)


def test_a_wrong_value_is_found_and_reduced():
    program = Program(INPUTS, BODY, trained=("x", "w"), weights=("w",), dynamic=True)
    assert not judge(program).failure
    assert judge(program, make=Planted).kind == "value"
    small = reduced(program, lambda p: judge(p, make=Planted).kind == "value")
    assert small.size() <= 3  # the function, the sine, the return
    assert "sin(" in small.body


@pytest.mark.parametrize(
    ("ours", "eager", "kind"),
    [
        ("y.t().contiguous().t()", "y", "stride"),
        ("y.float()", "y", "dtype"),
        ("y[:1]", "y", "shape"),
        ("y + 0", "y.t()", "memory"),
        ("x.add_(1) @ w", "y", "value"),
        ("y * torch.nan", "y * torch.inf", "value"),
        ("y.detach()", "y", "none"),
    ],
)
def test_whatever_differs_is_seen(ours, eager, kind):
    text = "y = x @ w\nreturn [y, {}]"
    trained = ("w",) if kind == "none" else ()
    have, want = (Program(INPUTS, text.format(t), trained=trained) for t in (ours, eager))
    if kind == "none":
        have, want = (replace(p, body=p.body.replace("[y, ", "[")) for p in (have, want))
    have, want = (run(p, p.load(), Harness()) for p in (have, want))
    assert kind in {text.split(":")[0] for _, text in differences(have, want)}
    assert not [*differences(have, have)]


def test_other_bits_are_found(monkeypatch):
    program = Program((("x", "randn(16, 32)"), ("w", "randn(32, 32)")),
                      "return [(x @ w * 0.3 + x) * x]", low="bfloat16")  # fmt: skip
    assert not fuzz_rounding.judge_bits(program).failure
    monkeypatch.setattr(fuzz_rounding, "Harness", lambda numerics: Harness())
    assert fuzz_rounding.judge_bits(program).kind == "rounding"


@pytest.mark.parametrize("faulty", [True, False])
def test_rounding_is_judged_in_both_numerics(faulty, monkeypatch):
    """A fault of one does not hide behind the other."""

    class Coarse(Harness):
        def __init__(self, reference):
            super().__init__(reference=reference)
            self.coarse = reference is faulty

        def __call__(self, gm, inputs):
            call = super().__call__(gm, inputs)
            kind = torch.float8_e4m3fn if self.coarse else torch.float64
            return lambda *a: [t.to(kind).to(t) for t in call(*a)]

    monkeypatch.setattr(fuzz_rounding, "Harness", Coarse)
    inputs = (("x", "randn(16, 32)"), ("w", "randn(32, 32)"))
    program = Program(inputs, "return [x @ w]", low="bfloat16")
    assert fuzz_rounding.judge(program).kind == "rounding"
