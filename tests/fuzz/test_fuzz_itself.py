# SPDX-License-Identifier: Apache-2.0
"""The hunter finds what is planted, reduces it, and its programs reach what they are meant for."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import fuzz_rounding
import fuzz_seeds
import pytest
import torch
from fuzz_oracle import Outcome, TooSlowError, differences, judge, run, time_limit
from fuzz_program import Program
from fuzz_reduce import reduced
from fuzz_writer import write
from harness import Harness

INPUTS = (("x", "randn(4, 8)"), ("w", "randn(8, 8)"), ("g", "1 + randn(8)"))
BODY = """\
a = F.rms_norm(x, (8,), g, 1e-3)
b = a @ w
with torch.autocast("cpu", enabled=False):
    c = torch.sin(b) * {factor}
d = c * (1 + torch.relu(a))
return [a, d + b]"""
PLAIN = BODY.format(factor="1")


class Planted(Harness):
    """Takes every sine for a cosine."""

    def _rewrite(self, graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default
        super()._rewrite(graph)


def test_a_wrong_value_is_found_and_reduced():
    program = Program(INPUTS, PLAIN, trained=("x", "w"), weights=("w",), dynamic=True)
    assert not judge(program).failure
    assert judge(program, make=Planted).kind == "value"
    small = reduced(program, lambda p: judge(p, make=Planted).kind == "value")
    assert small.size() <= 3  # the function, the sine, the return
    assert "sin(" in small.body
    assert len(small.inputs) == 1
    assert not small.training


def test_what_torch_compile_does_without_us_is_not_ours():
    program = Program(INPUTS, BODY.format(factor="(2 if torch.compiler.is_compiling() else 1)"))
    assert not judge(program).failure


@pytest.mark.parametrize("failure", ["", "value: planted"])
def test_the_script_of_a_failure_judges_its_program(failure, monkeypatch):
    asked = []

    def judged(mode, program):
        asked.append((mode, program))
        return Outcome(failure)

    monkeypatch.setattr(fuzz_seeds, "judged", judged)
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = write(3, training=True)
    with pytest.raises(SystemExit) as ended:
        exec(program.script("planted", "training"), {})  # noqa: S102  our own text
    assert ended.value.code == bool(failure)
    assert asked == [("training", program)]


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


def spin():
    while True:
        pass


def test_compiling_that_never_ends_is_said():
    class Endless(Harness):
        def _rewrite(self, graph):
            spin()

    found = judge(Program(INPUTS, "return [x @ w]"), limit=2, make=Endless)
    assert found.kind == "too slow"
    with pytest.raises(TooSlowError), time_limit(0.1):
        spin()


def test_rounding_is_judged_in_both_numerics(monkeypatch):
    """A fault of one must not hide behind the other."""
    program = Program(
        (("x", "randn(16, 32)"), ("w", "randn(32, 32)")), "return [x @ w]", low="bfloat16"
    )
    assert not fuzz_rounding.judge(program).failure
    for faulty in (True, False):

        class Coarse(Harness):
            def __init__(self, reference):
                super().__init__(reference=reference)
                self.coarse = reference is faulty  # noqa: B023 (used before the next one is made)

            def __call__(self, gm, inputs):
                call = super().__call__(gm, inputs)
                kind = torch.float8_e4m3fn if self.coarse else torch.float64
                return lambda *a: [t.to(kind).to(t) for t in call(*a)]

        monkeypatch.setattr(fuzz_rounding, "Harness", Coarse)
        assert fuzz_rounding.judge(program).kind == "rounding"


@pytest.mark.parametrize(
    ("chance", "others", "failure"), [(8, 1, ""), (1000, 1, "rounding"), (1000, math.nan, "")]
)
def test_rounding_that_is_chance_is_drawn_again(chance, others, failure, monkeypatch):
    """Ours is off by half as much again in the first draws only, or in all of them; or others have
    no error to compare with."""

    class Drawn(fuzz_rounding.Runs):
        def __call__(self, who, backend=None, draw=0):
            error = {"truth": 0, "ours": 1.5 if draw < chance else 1}.get(who, others)
            return {"output 0": torch.ones(1000, dtype=torch.float64) * (1 + error / 100)}

    monkeypatch.setattr(fuzz_rounding, "Runs", Drawn)
    assert fuzz_rounding.judge(Program((), "return []", low="bfloat16")).kind == failure
