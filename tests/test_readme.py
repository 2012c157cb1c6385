# SPDX-License-Identifier: Apache-2.0
"""The README is short, and what it claims in numbers comes from files of results."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
sys.path.insert(0, str(ROOT / "tools"))
gains: Any = importlib.import_module("gains")


def words(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())


def test_table_is_what_the_results_say():
    assert gains.BLOCK.findall(TEXT) == [gains.block()]


def test_picture_says_what_the_results_say(tmp_path):
    again = tmp_path / "gains.svg"
    gains.draw(again)
    assert words(again) == words(gains.PICTURE)
    assert len(words(again)) > 2 * sum(map(len, gains.GROUPS.values()))


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 20
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    listed = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(pages)
