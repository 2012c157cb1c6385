# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md, word for word: its files are written, its commands and programs run, and print
what it says they print. Examples of docs/internals/patterns_for_models.md pass the check."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

from coda_inductor.__main__ import main
from coda_inductor.cli.check import check_file

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a document, in order."""
    return BLOCK.findall((ROOT / "docs" / name).read_text())


def words(text: str) -> str:
    return " ".join(text.split())


def test_tutorial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said, codes = "", []
    page = (ROOT / "docs" / "tutorial.md").read_text()
    for language, text in blocks("tutorial.md"):
        if language == "python" and text.startswith("# "):
            Path(text.split("\n")[0].removeprefix("# ")).write_text(text)
            Path("wrong.py").write_text(text.replace("F.elu", "F.relu"))
            assert main(["check", "wrong.py"]) == 1
            assert "built_in = elu_glu: the results differ" in words(capsys.readouterr().out)
        elif language == "python":
            torch._dynamo.utils.counters.clear()  # a reader's program is a process of its own
            Path("tutorial_program.py").write_text(text)
            importlib.import_module("tutorial_program")
            assert f"The program prints `{capsys.readouterr().out.strip()}`" in page
        elif language == "sh":
            codes.append(main(shlex.split(text)[3:]))
            said = capsys.readouterr().out
        elif language == "text":
            for line in text.splitlines():
                assert words(line) in words(said)
    assert codes == [0]


PAGE = blocks("internals/patterns_for_models.md")
EXAMPLES = [text for language, text in PAGE if language == "python"]


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.split()[1])
def test_example_passes_every_check(text, tmp_path):
    path = tmp_path / text.split()[1]
    path.write_text(text)
    results = list(check_file(path))
    assert [r for r in results if r.outcome in ("fail", "note")] == []  # taught is what pays
    idioms = re.search(r"idioms=\((.*?)\)", text)[1].split(", ")
    assert {r.check for r in results} >= {f"float64 {idiom}" for idiom in idioms}
