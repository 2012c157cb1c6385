# SPDX-License-Identifier: Apache-2.0
"""The maps of the tree are true: each package names its files, the architecture names all rooms,
and no page names a file that is gone or links to nothing."""

import ast
import re
import tokenize
from pathlib import Path

import pytest

from coda_inductor.remedies import REMEDIES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, DOCS = ROOT / "coda_inductor", ROOT / "docs"
SOURCES = [*PACKAGE.rglob("*.py"), *(ROOT / "patterns").glob("*.py")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FOLDERS = ("coda_inductor", "patterns", "docs", "tests", "tools", "benchmarks", "examples")
#: Names that are no files of ours: a reader's own, those that a run writes, another project's.
NOT_OURS = {
    "CONTRIBUTING.md": "NAME.py", "debugging.md": "_before.py _raised.py _traced.py _rewritten.py "
    "_fused.py KEY.py names.json", "tutorial.md": "elu_glu.py wrong.py",
}  # fmt: skip


def words(path: Path) -> set[str]:
    text = path.read_text()
    text = ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else text
    return set(re.findall(r"\w+", text))


def modules(folder: Path) -> set[str]:
    return {p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}


@pytest.mark.parametrize(
    "package", sorted(p.parent for p in PACKAGE.rglob("__init__.py")), ids=lambda p: p.name
)
def test_a_package_names_its_files_and_none_that_is_gone(package):
    page = package / "__init__.py"
    assert not modules(package) - words(page) - {"__init__", "__main__"}
    text = ast.get_docstring(ast.parse(page.read_text())) or ""
    rows = re.findall(r"^(\w+) {2,}\S", text, re.MULTILINE)
    assert not set(rows) - modules(package)


def test_rotations_are_known_in_few_files():
    """Others ask whether an op crosses columns (``semantic.define.CROSSING``). QuACK's method
    ``rotate_batch_last`` is about dimensions."""
    known = set()
    for path in SOURCES:
        lines = iter(path.read_text().splitlines(keepends=True))
        code = (t.string for t in tokenize.generate_tokens(lambda lines=lines: next(lines, "")))
        code = " ".join(text for text in code if not text.startswith(("#", '"""')))
        known |= {path} if re.search("(?i)rotary|rotat(?!e_batch)", code) else set()
    assert len(known) <= 8


def test_the_architecture_names_all_rooms():
    assert not modules(PACKAGE) - words(DOCS / "architecture.md") - {"__init__"}


def test_no_page_names_a_file_that_is_gone_or_links_to_nothing():
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    files = [f"/{path.relative_to(ROOT)}" for path in (*found, *ROOT.glob("*.*"))]
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"`([\w./-]+\.(?:py|md|json|toml))(?:\[[^`]*)?`", text)
        gone = {name for name in named if not any(f.endswith(f"/{name}") for f in files)}
        others = tuple(NOT_OURS.get(page.name, "nothing").split())
        assert not [name for name in gone if not name.endswith(others)], page
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            elsewhere = re.search(r"://|^\.+$", link)
            assert elsewhere or (page.parent / link).exists(), (page, link)
    listed = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_no_page_names_a_reason_that_is_gone():
    first = {code.partition("-")[0] for code in REMEDIES if "-" in code}
    named = {c for page in PAGES for c in re.findall(r"`([a-z]+-[a-z-]+)`", page.read_text())}
    assert {code for code in named if code.partition("-")[0] in first} <= REMEDIES.keys()
