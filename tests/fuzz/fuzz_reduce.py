# SPDX-License-Identifier: Apache-2.0
"""A failing program made smaller: a change is taken if the program still fails in the same way.
Most changes make no valid program; the oracle says so, and they are not taken."""

from __future__ import annotations

import ast
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from fuzz_program import Program


def reduced(program: Program, fails: Callable[[Program], bool], seconds: float = 60) -> Program:
    """The smallest program found within ``seconds`` of wall time; ``program`` itself at worst."""
    end = time.monotonic() + seconds
    seen, again = {program}, True
    while again:
        again = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program
            if smaller not in seen and not seen.add(smaller) and fails(smaller):
                program, again = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for i in range(len(_changes(_parse(program)))):
        tree = _parse(program)
        _changes(tree)[i]()
        _tidy(tree)
        lines = [ast.unparse(ast.fix_missing_locations(s)) for s in tree.body[0].body]
        yield replace(program, body="\n".join(lines))
    for change in ({"dynamic": False}, {"custom": False}, {"weights": ()}, {"trained": ()}):
        yield replace(program, **change)
    for name in program.trained:
        yield replace(program, trained=tuple(n for n in program.trained if n != name))
    for name, text in reversed(program.inputs):
        others = [other for other in program.inputs if other[0] != name]
        if not re.search(rf"\b{name}\b", "\n".join([program.body, *(t for _, t in others)])):
            used = {k: tuple(n for n in getattr(program, k) if n != name) for k in _LISTS}
            yield replace(program, inputs=tuple(others), **used)
        if plain := re.search(r"randn\([\d, ]+\)", text):
            inputs = tuple((n, plain[0] if n == name else t) for n, t in program.inputs)
            yield replace(program, inputs=inputs)


_LISTS = ("trained", "weights")


def _changes(tree: ast.Module) -> list[Callable[[], object]]:
    """Ending early; without some statements, or a region's head; with an expression replaced by a
    part of itself; with fewer outputs."""
    found: list[Callable[[], object]] = []
    whole = tree.body[0].body
    for i, statement in enumerate(whole[:-2]):
        if name := _assigned(statement):
            found.append(
                partial(_put, whole, i + 1, len(whole), ast.parse(f"return [{name}]").body)
            )
    for body in _bodies(tree):
        for size in (16, 8, 4, 2, 1):
            for first in range(len(body) - size, -1, -size):
                if not any(isinstance(s, ast.Return) for s in body[first : first + size]):
                    rest = [ast.Pass()] if size == len(body) else []
                    found.append(partial(_put, body, first, first + size, rest))
        for i, s in enumerate(body):
            if isinstance(s, ast.With):
                found.append(partial(_put, body, i, i + 1, s.body))
            if isinstance(s, ast.Assign):
                parts = [n for n in ast.walk(s.value) if isinstance(n, ast.expr)][1:]
                parts.sort(key=lambda n: len(ast.unparse(n)))
                found += [partial(setattr, s, "value", part) for part in parts]
            if isinstance(s, ast.Return) and isinstance(s.value, ast.List):
                outputs = s.value.elts
                each = range(len(outputs) if len(outputs) > 1 else 0)
                found += [partial(_put, outputs, j, j + 1, []) for j in each]
    return found


def _put(things: list, first: int, last: int, instead: list) -> None:
    things[first:last] = instead


def _tidy(tree: ast.Module) -> None:
    """Without second names for one value and values that nothing reads."""
    for _ in [*ast.walk(tree)]:
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
        for body, s in [(each, s) for each in _bodies(tree) for s in each if len(each) > 1]:
            name = _assigned(s)
            read = [n for n in names if n.id == name and isinstance(n.ctx, ast.Load)]
            second = isinstance(s, ast.Assign) and isinstance(s.value, ast.Name)
            if name and (second or not read):
                body.remove(s)
                for n in names if second else ():
                    n.id = s.value.id if n.id == name else n.id
                break


def _parse(program: Program) -> ast.Module:
    return ast.parse(f"if 1:\n{textwrap.indent(program.body, '    ')}")


def _assigned(statement: ast.stmt) -> str | None:
    """The one name that a statement gives a value."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return statement.name if isinstance(statement, ast.FunctionDef) else None


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    """Every list of statements: the function's, and those of regions."""
    regions = (ast.If, ast.With, ast.FunctionDef)
    return [node.body for node in ast.walk(tree) if isinstance(node, regions)]
