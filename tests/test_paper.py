# SPDX-License-Identifier: Apache-2.0
"""``benchmarks paper``: its cuts on a CPU, what it asks of the paper's kernels, and its page."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import paper, paper_cuts
from benchmarks.environment import REPOSITORY
from benchmarks.paper_page import PAGE, baseline, markdown, write


def _variant(ms: float, modes: str = "forward backward step") -> dict:
    return {m: {"median_ms": ms, "error": 0.004, "peak_mib": 512.0} for m in modes.split()}


FOUND = {
    "environment": {"gpu": "G", "date": "2026-01-02T", "commit": "c", "command": "x",
                    "versions": {"torch": "2"}},
    "results": {
        "residual 2048": {
            "errors": {"flashinfer, backward": "NotImplementedError: no backward"},
            "variants": {"compile": _variant(3.0), "max_autotune": _variant(2.0),
                         "coda": _variant(1.6), "flashinfer": _variant(2.5, "forward")},
        },
        "head 2048": {"errors": {}, "variants": {"coda": _variant(1.0)}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", paper_cuts.CUTS)
def test_a_cut_is_as_exact_as_bfloat16_and_what_fails_says_why(name, monkeypatch):
    kit = paper_cuts.Torch()

    def makers(case, _tune):
        function = case.cut.function
        return {
            "eager": lambda: lambda *x: function(kit, case.cut, *x),
            "forward only": lambda: lambda *x: function(kit, case.cut, *(y.detach() for y in x)),
            "none": lambda: 1 / 0,
        }

    monkeypatch.setattr(paper.Case, "makers", makers)
    case = paper.Case(paper_cuts.Cut(name, 256, 16, 64, name == "head"), False, False)
    facts = case.facts()

    modes = ["forward", "backward", *(["step"] if name in ("head", "layer") else [])]
    assert [*facts["variants"]["eager"]] == modes
    assert 0 < max(each["error"] for each in facts["variants"]["eager"].values()) < 0.01
    assert "ZeroDivisionError" in facts["errors"]["none"]
    assert [*facts["variants"]["forward only"]] == ["forward"]
    assert "RuntimeError" in facts["errors"]["forward only, backward"]


def test_work_waits_for_memory_that_others_have_and_for_nothing_else(monkeypatch):
    waits, answers = [], [torch.OutOfMemoryError("CUDA out of memory"), 3]

    def work():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(paper.time, "sleep", waits.append)
    assert paper.patient(work) == 3
    assert len(waits) == 1
    answers.append(RuntimeError("another"))
    with pytest.raises(RuntimeError, match="another"):
        paper.patient(work)


def test_the_papers_rotary_gets_its_own_layout_and_turns_as_ours():
    def gemm_rope(x, weight, positions, frequencies):
        """As coda-kernels says of its epilogue: pairs, and turns as a number and its rest."""
        a, b = (x.double() @ weight.double()).unflatten(1, (-1, 2)).unbind(-1)
        turns = positions[:, None] * frequencies.double().unflatten(0, (-1, 2)).sum(1)
        s, c = (2 * math.pi * turns).sin(), (2 * math.pi * turns).cos()
        return torch.stack([a * c + b * s, b * c - a * s], -1).flatten(1)

    cut = paper_cuts.Cut("rotary", 256, 64, 64)
    kit = object.__new__(paper_cuts.Paper)
    kit.gemms = SimpleNamespace(gemm_rope=gemm_rope)
    (x,) = cut.inputs
    (found,) = kit.rotary(x, cut)
    (wanted,) = kit.pack(cut, paper_cuts.Torch().rotary(x.double(), cut.double()))
    assert (found - wanted).norm() < 0.004 * wanted.norm()  # our cos and sin are of bfloat16


def test_the_committed_page_is_of_the_committed_results():
    files = sorted((REPOSITORY / "benchmarks" / "results").glob("*_paper.json"))
    pages = [markdown(json.loads(file.read_text()), file.name) for file in files]
    assert pages == ([PAGE.read_text()] if PAGE.exists() else [])


def test_the_page_and_its_picture_compare_with_the_faster_torch_compile(tmp_path):
    write(FOUND, "made_up.json", tmp_path / "results" / "paper.md")

    page = (tmp_path / "results" / "paper.md").read_text()
    words = re.findall(r">([^<>]+)</text>", (tmp_path / "results" / "paper.svg").read_text())
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["residual 2048", "3.000", "2.000", "1.600", "2.500", "1.25"] in cells
    assert ["residual 2048", "3.000", "2.000", "1.600", "-", "1.25"] in cells
    assert ["head 2048", "-", "-", "1.000", "-", "-"] in cells
    assert ["residual 2048", "0.50", "0.50", "0.50", "-"] in cells
    assert "- residual 2048, flashinfer, backward: NotImplementedError: no backward" in page
    assert words.count("1.25") == 2
    assert words.count("flashinfer") == 1
    assert baseline(FOUND["results"]["head 2048"], "forward") is None
