# SPDX-License-Identifier: Apache-2.0
"""``benchmarks paper``: its cuts on a CPU, what it asks of the paper's kernels, and its page."""

import json

import pytest

from benchmarks import paper, paper_cuts
from benchmarks.environment import REPOSITORY
from benchmarks.paper_page import PAGE, markdown


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


def test_the_committed_page_is_of_the_committed_results():
    files = sorted((REPOSITORY / "benchmarks" / "results").glob("*_paper.json"))
    pages = [markdown(json.loads(file.read_text()), file.name) for file in files]
    assert pages == ([PAGE.read_text()] if PAGE.exists() else [])
