# SPDX-License-Identifier: Apache-2.0
"""Tests mirror the package: who knows where a thing is knows where its tests are."""

from __future__ import annotations

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


def test_a_folder_of_tests_is_a_room_or_one_of_a_few():
    rooms = {name for name in folders(PACKAGE) if Path(name).name not in DATA}
    strange = {name for name in folders(TESTS) if name.split("/")[0] not in ELSEWHERE} - rooms
    assert strange - {"codegen/goldens"} == set()


@pytest.mark.parametrize("rule", rules())
def test_a_rule_has_its_tests_beside_it(rule):
    assert beside(rule)
