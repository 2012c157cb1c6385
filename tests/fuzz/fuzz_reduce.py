# SPDX-License-Identifier: Apache-2.0
"""A failing program made smaller: a change is taken if the program still fails in the same way.
Most changes make no valid program; the oracle says so, and they are not taken."""

import ast
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

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
    plain = {"trained": (), "weights": (), "dynamic": False, "custom": False, "memory": None}
    for change in ({name: value} for name, value in plain.items()):
        yield replace(program, **change)  # first: what comes after compiles faster
    for lines in _changed(program.body.split("\n")):
        yield replace(program, body="\n".join(lines))
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


def _changed(lines: list[str]) -> Iterator[list[str]]:
    """Ending early; without some statements, a region or its head; with a value in the place of
    what is made of it; with fewer outputs."""
    for size in (16, 8, 4, 2, 1):
        for first in range(len(lines) - size, -1, -size):
            yield lines[:first] + lines[first + size :]
    for i, line in enumerate(lines):
        before, after = lines[:i], lines[i + 1 :]
        if line.endswith(":"):
            indent = line[: len(line) - len(line.lstrip())] + "    "
            inside = [not each.startswith(indent) for each in (*after, "")].index(True)
            yield before + after[inside:]
            yield before + [each[4:] for each in after[:inside]] + after[inside:]
        if made := re.fullmatch(r"\s*(\w+) = (.*)", line):
            yield [*before, line, f"return [{made[1]}]"]
            for name in dict.fromkeys(re.findall(r"(?<!\.)\b[a-z]\w*\b(?![(.])", made[2])):
                yield before + [re.sub(rf"\b{made[1]}\b", name, each) for each in after]
        if line.startswith("return ["):
            outputs = [ast.unparse(each) for each in ast.parse(line[7:], mode="eval").body.elts]
            for j in range(len(outputs) if len(outputs) > 1 else 0):
                yield [*before, f"return [{', '.join(outputs[:j] + outputs[j + 1 :])}]"]
