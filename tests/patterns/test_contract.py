# SPDX-License-Identifier: Apache-2.0
"""docs/patterns_for_models.md is complete and true: its examples pass the check, its vocabulary is
the prover's, and what it says that we say we do say."""

from __future__ import annotations

import re

import pytest
from test_tutorial import ROOT, blocks

from coda_inductor.cli.steps import check_file
from coda_inductor.patterns.formulas import FORMULAS

PAGE = "patterns_for_models.md"
TEXT = (ROOT / "docs" / PAGE).read_text()
EXAMPLES = [text for language, text in blocks(PAGE) if language == "python"]


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.split()[1])
def test_example_passes_every_check(text, tmp_path, prove_here):
    path = tmp_path / text.split()[1]
    path.write_text(text)
    results = list(check_file(path, lambda what: None))
    assert [r for r in results if r.outcome == "fail"] == []
    idioms = re.search(r"idioms=\((.*?)\)", text)[1].split(", ")
    checks = {r.check for r in results}
    assert checks >= {
        f"{step} {idiom}" for step in ("match", "fires", "float64") for idiom in idioms
    }


def test_vocabulary_is_the_provers():
    (listed,) = [text.split() for language, text in blocks(PAGE) if language == "vocabulary"]
    assert listed == sorted(set(FORMULAS) - {"cast", "silu_backward"})


def test_every_message_and_every_reason_is_one_of_ours():
    """The first column of the tables of messages, piece by piece, against the sources."""
    section = TEXT.split("## What it says, and what to do")[1]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    pieces = [piece for row in rows for piece in re.findall(r"`([^`]+)`", row)]
    folder = ROOT / "coda_inductor"
    sources = "".join(p.read_text() for p in sorted(folder.rglob("*.py")))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # messages over several lines
    missing = [p for p in pieces if p not in sources and p != "SyntaxError"]
    assert missing == []
    assert len(pieces) > 30


def test_every_field_of_a_pattern_is_described():
    from dataclasses import fields

    from coda_inductor import Pattern

    described = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
    for_ops = {"op", "arguments", "result"}  # the vocabulary of this repository, not of authors
    assert {f.name for f in fields(Pattern)} - for_ops <= described
