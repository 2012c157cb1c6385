# SPDX-License-Identifier: Apache-2.0
"""Every reason has a code, every code a remedy, every remedy a use. No sentence is read."""

import ast
from pathlib import Path

import pytest

from coda_inductor.refusal import refuse
from coda_inductor.remedies import REMEDIES

ROOT = Path(__file__).resolve().parents[1]
#: Where codes are read, not given.
READERS = {ROOT / "coda_inductor" / name for name in ("remedies.py", "report.py")}


def trees():
    for folder in ("coda_inductor", "patterns"):
        for path in (ROOT / folder).rglob("*.py"):
            if path not in READERS:
                yield path, ast.parse(path.read_text(encoding="utf-8"))


def literals(node):
    """The strings that an argument may be: itself, or either branch of a choice."""
    if isinstance(node, ast.IfExp):
        return literals(node.body) + literals(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) else []


def given():
    """(place, code) of each ``refuse("code", ...)`` and ``Refusal("code", ...)``."""
    for path, tree in trees():
        for node in ast.walk(tree):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if named and node.func.id in ("refuse", "Refusal") and node.args:
                for code in literals(node.args[0]):
                    yield f"{path.name}:{node.lineno}", code


def test_every_code_has_a_remedy():
    found = list(given())
    assert len(found) > 50
    assert not [(place, code) for place, code in found if code not in REMEDIES]


def test_every_remedy_has_a_use():
    strings = {
        node.value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert sorted(set(REMEDIES) - strings) == []


def test_a_code_without_remedy_is_refused_at_birth():
    with pytest.raises(KeyError):
        refuse("the-moon-is-full", "the moon is full")
