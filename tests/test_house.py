# SPDX-License-Identifier: Apache-2.0
"""Tests mirror the package: who knows where a thing is knows where its tests are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "coda_inductor"
#: Folders that stand for no room: what is in them is about all rooms, or is no test.
ELSEWHERE = {
    "distributed": "several ranks through everything",
    "fuzz": "random programs through everything",
    "gpu": "kernels that run",
    "models": "whole models through everything",
    "proofs": "what the rules claim, proved about rewrite/",
    "cxx": "the C++ compiler of the tests",
}
#: Folders of the package that hold data, not modules.
DATA = {"templates", "tables"}


def folders(below: Path) -> set[str]:
    found = (p for p in below.rglob("*") if p.is_dir() and "__pycache__" not in p.parts)
    return {str(p.relative_to(below)) for p in found}


def beside(name: str) -> list[str]:
    """The files that test the module or folder ``name``, "rewrite/tables"."""
    place = TESTS / name
    return [
        str(p) for p in [*place.glob("test_*.py"), *place.parent.glob(f"test_{place.name}*.py")]
    ]


def rules() -> list[str]:
    """The rewrites of coda_inductor/rewrite, a file or a folder each."""
    parts = (PACKAGE / "rewrite").iterdir()
    return sorted(f"rewrite/{p.stem}" for p in parts if not p.name.startswith("__"))


def imported(path: Path) -> set[str]:
    """The modules of the package that a test names in its imports, "coda_inductor.select.gate"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("coda_inductor.")}


def test_a_folder_of_tests_is_a_room_or_one_of_a_few():
    rooms = {name for name in folders(PACKAGE) if Path(name).name not in DATA}
    strange = {name for name in folders(TESTS) if name.split("/")[0] not in ELSEWHERE} - rooms
    assert strange - {"codegen/goldens"} == set()


@pytest.mark.parametrize("rule", rules())
def test_a_rule_has_its_tests_beside_it(rule):
    assert beside(rule)


def test_a_test_of_one_room_stands_in_it():
    """A file at the top is about modules at the top, or about several rooms, or benchmarks."""
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    for path in TESTS.glob("test_*.py"):
        if path.stem.startswith("test_benchmarks"):
            continue
        used = {name.split(".")[1] for name in imported(path)}
        assert len(used) != 1 or not used <= rooms, f"{path.name} belongs to {used}"
