# SPDX-License-Identifier: Apache-2.0
"""What the README says in numbers is made by ``tools/gains.py`` of files in benchmarks/results."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = (ROOT / "README.md").read_text(), ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))
gains: Any = importlib.import_module("gains")


def test_blocks_and_pictures_are_what_the_results_say():
    assert {m[1]: m[0] for m in gains.BLOCK.finditer(README)} == gains.blocks()
    for name, colors in gains.PICTURES.items():
        assert (DOCS / name).read_text() == gains.picture(*colors)


def test_the_readme_has_no_figure_of_its_own_and_fits():
    rest = gains.BLOCK.sub("", README)
    assert not re.search(r"(?<![\w.,-])\d+(\.\d+)?( ?(ms|us|[GM]iB)\b|x(?!\w))", rest)
    assert len(README.splitlines()) <= 110
    assert len(gains.table()) <= 10
