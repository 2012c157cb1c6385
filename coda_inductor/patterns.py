"""Pattern files: what they hold and how they are found and loaded.

A pattern file is a Python module with a module-level ``PATTERN`` (or a list ``PATTERNS``). The
built-in ones live in ``patterns/`` of the repository and are shipped inside the wheel; they go
through the same door as a user's.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from coda_inductor.errors import PatternError
from coda_inductor.matching import Idiom, Match

#: A side condition: None if it holds, else the reason why the pattern must not fire.
Condition = Callable[[Match], str | None]


@dataclass(frozen=True)
class Pattern:
    """An idiom in its spellings, and the semantic op that it means.

    Attributes:
        name: what counters, logs and ``options["disable"]`` call it.
        idioms: plain PyTorch functions, one a spelling, most specific first.
        op: the semantic op (an OpOverload of ``coda_inductor.semantic``).
        arguments: from a match to the op's arguments (graph nodes and literals).
        conditions: checked in order; the first reason wins and is shown to the user.
        result: index of the op's output that replaces the idiom, or None for a single output.
        priority: patterns with a higher number are tried first.
        identities: returns sympy pairs (left, right) that must be equal, the proof obligation.
    """

    name: str
    idioms: tuple[Callable[..., Any], ...]
    op: torch._ops.OpOverload
    arguments: Callable[[Match], tuple[Any, ...]]
    conditions: tuple[Condition, ...] = ()
    result: int | None = None
    priority: int = 0
    identities: Callable[[], Sequence[tuple[Any, Any]]] | None = None

    @functools.cached_property
    def traced(self) -> tuple[Idiom, ...]:
        return tuple(Idiom(function) for function in self.idioms)

    def refusal(self, match: Match) -> str | None:
        """The first side condition that does not hold, or None."""
        return next((why for c in self.conditions if (why := c(match)) is not None), None)


def builtin_folder() -> Path:
    """Where the shipped pattern files are: in the installed package, else beside the checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_patterns", package.parent / "patterns"):
        if folder.is_dir():
            return folder
    raise PatternError(f"no built-in pattern files beside {package}: reinstall coda-inductor")


def load_file(path: str | Path) -> tuple[Pattern, ...]:
    """Load one pattern file.

    Raises:
        PatternError: the file is missing, fails to import, or defines no pattern.
    """
    path = Path(path)
    if not path.is_file():
        raise PatternError(f"no such pattern file: {path}")
    module = _import(path)
    found = getattr(module, "PATTERNS", None)
    if found is None and hasattr(module, "PATTERN"):
        found = [module.PATTERN]
    if not found or not all(isinstance(p, Pattern) for p in found):
        raise PatternError(
            f"{path}: define PATTERN = coda_inductor.Pattern(...) or a list PATTERNS of them"
        )
    return tuple(found)


def _import(path: Path) -> ModuleType:
    name = f"coda_inductor_pattern_{path.stem}_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PatternError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        line = _line_in(error, path)
        raise PatternError(f"{path}{line}: {type(error).__name__}: {error}") from error
    return module


def _line_in(error: Exception, path: Path) -> str:
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f":{line}" if line else ""


def load(extra: tuple[str, ...] = ()) -> tuple[Pattern, ...]:
    """The user's patterns, then the built-in ones, higher priority first. An edited file is read
    again.

    Raises:
        PatternError: as :func:`load_file`.
    """
    found: list[Pattern] = []
    for file in files(extra):
        if not file.is_file():
            raise PatternError(f"no such pattern file: {file}")
        found += _load_version(file, file.stat().st_mtime_ns, file.stat().st_size)
    return tuple(sorted(found, key=lambda p: -p.priority))


@functools.lru_cache(maxsize=64)
def _load_version(file: Path, _mtime_ns: int, _size: int) -> tuple[Pattern, ...]:
    return load_file(file)


def files(extra: tuple[str, ...] = ()) -> tuple[Path, ...]:
    """All pattern files in use (cache keys cover their content)."""
    return (*map(Path, extra), *sorted(builtin_folder().glob("*.py")))
