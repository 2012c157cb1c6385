# SPDX-License-Identifier: Apache-2.0
"""What a pattern file may not contain: a look at its syntax before any of it runs.

A pattern needs torch, sympy and mathematics; a file that opens files, starts processes or reaches
for the interpreter's internals is no pattern, whatever else it is. This is a lint against accidents
and the crudest malice, not a sandbox: a determined author gets around it, and a file that passes
runs with all the rights of the process. Load only files that you would run.

It also keeps files self-contained, so that a file's content alone decides what its patterns are:
cache keys rest on that.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from coda_inductor.errors import PatternError

#: Set to 1 to load files that this check refuses.
TRUST = "CODA_TRUST_PATTERNS"

MODULES = (
    "torch", "sympy", "math", "operator", "functools", "itertools", "typing", "collections",
    "dataclasses", "__future__", "coda_inductor",
)  # fmt: skip
_CALLS = frozenset(
    {
        "exec", "eval", "compile", "open", "input", "breakpoint", "__import__", "getattr",
        "setattr", "delattr", "globals", "locals", "vars", "exit", "quit",
    }
)  # fmt: skip
#: Modules and functions that can be reached through the allowed ones, as ``torch.os``.
_ATTRIBUTES = frozenset(
    {
        "os", "sys", "subprocess", "socket", "shutil", "ctypes", "builtins", "importlib", "inspect",
        "system", "popen", "hub", "load", "save", "cpp_extension", "load_library", "lambdify",
        "sympify", "parse_expr", "preview", "cache_dir", "runtime", "pathlib", "Path", "tempfile",
        "pickle", "urllib", "open", "exec", "eval", "write_text", "write_bytes", "unlink",
    }
)  # fmt: skip
#: sympy evaluates strings as Python: names that only an escape from it needs.
_TEXTS = re.compile(r"__(import|builtins|class|bases?|mro|subclasses|globals|getattribute)__")
_DUNDERS = frozenset({"__name__", "__doc__", "__all__", "__file__"})


_told: set[str] = set()


def trust() -> None:
    """Let all files pass from now on, in this process: its parent's user said so."""
    _told.add(TRUST)


def trusted() -> bool:
    """Does the user say that files are to be trusted? ``python -I`` heeds no environment."""
    asked = os.environ.get(TRUST, "") in ("1", "true")
    return TRUST in _told or (asked and not sys.flags.ignore_environment)


def check(path: Path, source: str) -> None:
    """Refuse a file that looks like something other than a pattern.

    Raises:
        PatternError: it does not parse, or contains what a pattern has no use for; it names file
            and line, and how to load the file all the same.
    """
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise PatternError(
            f"{path}{f':{line}' if line else ''}: {type(error).__name__}: {error}"
        ) from error
    if trusted():
        return
    for node in ast.walk(tree):
        for what in _objections(node):
            raise PatternError(
                f"{path}:{getattr(node, 'lineno', 1)}: {what}, which a pattern file has no use for "
                f"(it may import {', '.join(MODULES)}). If you trust the file, set {TRUST}=1"
            )


def _objections(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"it imports {a.name}" for a in node.names if not _allowed(a.name))
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        if not _allowed(module):
            yield f"it imports {module}"
        yield from (f"it imports {a.name}" for a in node.names if a.name in _ATTRIBUTES)
    elif isinstance(node, ast.Name):
        if node.id in _CALLS or (_dunder(node.id) and node.id not in _DUNDERS):
            yield f"it uses {node.id}"
    elif isinstance(node, ast.Attribute):
        if node.attr in _ATTRIBUTES or _dunder(node.attr):
            yield f"it uses .{node.attr}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from (f"it holds the text {m.group()}" for m in _TEXTS.finditer(node.value))
    elif isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
        yield "it is asynchronous"


def _allowed(module: str) -> bool:
    parts = module.split(".")
    return parts[0] in MODULES and not _ATTRIBUTES & set(parts)


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
