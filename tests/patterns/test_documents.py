# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md, word for word: its files are written, its commands and programs run, and print
what it says they print. Examples of docs/internals/patterns_for_models.md pass the check, and its
vocabulary is the prover's."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

from coda_inductor.__main__ import main
from coda_inductor.cli.check import check_file
from coda_inductor.patterns.formulas import FORMULAS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a document, in order."""
    return BLOCK.findall((ROOT / "docs" / name).read_text())


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def _in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_in_tmp")
def test_tutorial(capsys):
    said, codes, seen = "", [], set()
    page = (ROOT / "docs" / "tutorial.md").read_text()
    for language, text in blocks("tutorial.md"):
        seen.add(language)
        if language == "python" and text.startswith("# "):
            Path(text.split("\n")[0].removeprefix("# ")).write_text(text)
            Path("wrong.py").write_text(text.replace("F.elu", "F.relu"))
            assert main(["check", "wrong.py"]) == 1
            assert "built_in = elu_glu: they differ" in words(capsys.readouterr().out)
        elif language == "python":
            torch._dynamo.utils.counters.clear()  # a reader's program is a process of its own
            Path("tutorial_program.py").write_text(text)
            importlib.import_module("tutorial_program")
            assert f"The program prints `{capsys.readouterr().out.strip()}`" in page
        elif language == "sh":
            command = shlex.split(text)
            assert command[:3] == ["python", "-m", "coda_inductor"]
            codes.append(main(command[3:]))
            said = capsys.readouterr().out
        elif language == "text":
            for line in text.splitlines():
                assert words(line) in words(said)
    assert codes == [0]
    assert seen == {"python", "sh", "text"}
    assert len(Path("elu_glu.py").read_text().splitlines()) < 30


PAGE = "internals/patterns_for_models.md"
EXAMPLES = [text for language, text in blocks(PAGE) if language == "python"]


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.split()[1])
def test_example_passes_every_check(text, tmp_path):
    path = tmp_path / text.split()[1]
    path.write_text(text)
    results = list(check_file(path))
    assert [r for r in results if r.outcome in ("fail", "note")] == []  # taught is what pays
    idioms = re.search(r"idioms=\((.*?)\)", text)[1].split(", ")
    checks = {r.check for r in results}
    assert checks >= {
        f"{step} {idiom}" for step in ("match", "fires", "float64") for idiom in idioms
    }


def test_vocabulary_is_the_provers():
    (listed,) = [text.split() for language, text in blocks(PAGE) if language == "vocabulary"]
    assert listed == sorted(set(FORMULAS) - {"silu_backward"})
