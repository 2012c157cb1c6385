# SPDX-License-Identifier: Apache-2.0
"""A failing program made smaller: delta debugging over its statements and expressions.

Each step proposes a smaller program: a statement left out, a region opened, an expression replaced
by a part of itself, a setting turned off. It is taken if it still fails in the same way. Most
proposals are no valid programs; the oracle says so, and they are not taken.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz_program import Program

#: Does this program still fail in the same way?
Fails = Callable[[Program], bool]


def reduced(program: Program, fails: Fails, seconds: float = 60) -> Program:
    """The smallest program found within ``seconds`` of wall time; ``program`` itself at worst."""
    end = time.monotonic() + seconds
    seen: set[Program] = set()
    again = True
    while again:
        again = False
        for attempt in (_shorter, _settings, _statements, _expressions, _inputs):
            taken = True
            while taken:  # from where the last one was taken, so that each is asked about once
                taken = False
                for smaller in attempt(program):
                    if time.monotonic() > end:
                        return program
                    if smaller in seen or smaller == program:
                        continue
                    seen.add(smaller)
                    if fails(smaller):
                        program, taken, again = smaller, True, True
                        break
    return program


def _settings(program: Program) -> Iterator[Program]:
    for change in ({"dynamic": False}, {"custom": False}, {"weights": ()}, {"trained": ()}):
        yield replace(program, **change)
    half = len(program.trained) // 2
    for trained in (program.trained[:half], program.trained[half:]):
        yield replace(program, trained=trained)
    for name in program.trained:
        yield replace(program, trained=tuple(n for n in program.trained if n != name))


def _shorter(program: Program) -> Iterator[Program]:
    """Ending early: one of the first values is all that is returned."""
    names = [_assigned(s) for s in _parse(program.body).body[0].body]
    for i, name in enumerate(names[:-1]):
        if name and len(names) > i + 2:
            tree = _parse(program.body)
            statements = tree.body[0].body
            statements[i + 1 :] = ast.parse(f"[{name}]").body
            statements[-1] = ast.Return(statements[-1].value)
            yield _with(program, tree)


def _statements(program: Program) -> Iterator[Program]:
    """Without some statements: halves, quarters, ..., single ones; a region without its head."""
    count = len(list(_blocks(_parse(program.body))))
    for block in range(count):
        length = len(_nth(_parse(program.body), block))
        size = max(1, length // 2)
        while size:
            for first in range(max(0, length - size), -1, -size):
                tree = _parse(program.body)
                statements = _nth(tree, block)
                gone = statements[first : first + size]
                if any(isinstance(s, ast.Return) for s in gone):
                    continue
                statements[first : first + size] = [ast.Pass()] if len(statements) == size else []
                yield _with(program, tree)
            size //= 2
        for i in range(length):
            tree = _parse(program.body)
            statements = _nth(tree, block)
            if isinstance(statements[i], ast.With):
                statements[i : i + 1] = statements[i].body
                yield _with(program, tree)


def _expressions(program: Program) -> Iterator[Program]:
    """With an expression replaced by a part of itself; with fewer outputs."""
    for i, node in enumerate(ast.walk(_parse(program.body))):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            for j in range(len(node.value.elts) if len(node.value.elts) > 1 else 0):
                tree = _parse(program.body)
                del _walked(tree, i).value.elts[j]
                yield _with(program, tree)
        if not isinstance(node, ast.Assign):
            continue
        parts = [n for n in ast.walk(node.value) if isinstance(n, ast.expr) and n is not node.value]
        if isinstance(node.value, ast.Call) and "checkpoint" in ast.unparse(node.value.func):
            parts.insert(0, ast.Call(node.value.args[0], [node.value.args[1]], []))
        for part in sorted(parts, key=lambda n: len(ast.unparse(n))):
            text = ast.unparse(part)
            if re.search(r"[vxwg]\d*\b", text):
                tree = _parse(program.body)
                _walked(tree, i).value = part
                yield _with(program, tree)


def _inputs(program: Program) -> Iterator[Program]:
    """Without inputs that nothing reads; with plain values of the others."""
    for name, _ in reversed(program.inputs):
        others = [t for n, t in program.inputs if n != name]
        if not re.search(rf"\b{name}\b", "\n".join([program.body, *others])):
            yield replace(
                program,
                inputs=tuple((n, t) for n, t in program.inputs if n != name),
                trained=tuple(n for n in program.trained if n != name),
                weights=tuple(n for n in program.weights if n != name),
            )
    for name, text in program.inputs:
        plain = re.search(r"randn\([\d, ]+\)", text)
        if plain and plain[0] != text:
            inputs = tuple((n, plain[0] if n == name else t) for n, t in program.inputs)
            yield replace(program, inputs=inputs)


def _parse(body: str) -> ast.Module:
    return ast.parse(f"if 1:\n{_indented(body)}")


def _indented(body: str) -> str:
    return "\n".join("    " + line for line in body.split("\n"))


def _assigned(statement: ast.stmt) -> str | None:
    """The one name that a statement gives a value."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


class _Renamed(ast.NodeTransformer):
    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.new, node.ctx) if node.id == self.old else node


def _tidied(tree: ast.Module) -> ast.Module:
    """Without second names for one value and values that nothing reads."""
    changed = True
    while changed:
        changed = False
        read = {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        for statements in _blocks(tree):
            for statement in statements:
                name = _assigned(statement)
                if isinstance(statement, ast.FunctionDef):
                    name = statement.name
                second = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)
                if name is None or len(statements) == 1 or (name in read and not second):
                    continue
                statements.remove(statement)
                if name in read:
                    tree = _Renamed(name, statement.value.id).visit(tree)
                changed = True
                break
            if changed:
                break
    return tree


def _with(program: Program, tree: ast.Module) -> Program:
    tree = _tidied(tree)
    statements = [ast.unparse(ast.fix_missing_locations(s)) for s in tree.body[0].body]
    return replace(program, body="\n".join(statements))


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Every list of statements: the function's, and those of regions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.With, ast.FunctionDef)):
            yield node.body


def _nth(tree: ast.Module, block: int) -> list[ast.stmt]:
    return list(_blocks(tree))[block]


def _walked(tree: ast.Module, i: int) -> ast.AST:
    return list(ast.walk(tree))[i]
