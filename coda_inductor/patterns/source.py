# SPDX-License-Identifier: Apache-2.0
"""One pattern file -> its patterns. The file is read and run; nothing is compared yet."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from coda_inductor.errors import PatternError
from coda_inductor.patterns.meaning import DIGEST
from coda_inductor.patterns.pattern import Pattern


@dataclass(frozen=True)
class Source:
    """A file and its text. It is read only once, so that exactly this text is run."""

    path: Path
    text: str
    digest: str


def read(path: Path) -> Source:
    """Read a pattern file.

    Raises:
        PatternError: it is missing, cannot be read, or is not UTF-8 text.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise PatternError(f"no such pattern file: {path}") from None
    except OSError as error:
        raise PatternError(f"pattern file {path} cannot be read: {error.strerror}") from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise PatternError(f"{path}: not a UTF-8 text file: {error}") from error
    return Source(path, text, hashlib.sha256(content).hexdigest())


def run(source: Source) -> tuple[Pattern, ...]:
    """Run a file. Returns the patterns that it defines.

    Raises:
        PatternError: it fails, or defines no pattern.
    """
    module = _import(source)
    patterns = getattr(module, "PATTERNS", None)
    if patterns is None and hasattr(module, "PATTERN"):
        patterns = [module.PATTERN]
    if (
        not patterns
        or not isinstance(patterns, (tuple, list))
        or not all(isinstance(p, Pattern) for p in patterns)
    ):
        raise PatternError(
            f"{source.path}: define PATTERN = coda_inductor.Pattern(...) or a list PATTERNS of them"
        )
    return tuple(patterns)


def _import(source: Source) -> ModuleType:
    """The file as a module, compiled from its text, never from stale byte code."""
    module = ModuleType(f"coda_inductor_pattern_{source.path.stem}_{source.digest[:12]}")
    module.__file__ = str(source.path)
    module.__dict__[DIGEST] = source.digest
    sys.modules[module.__name__] = module
    try:
        exec(compile(source.text, str(source.path), "exec"), module.__dict__)  # noqa: S102
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        line = _line_in(error, source.path)
        text = str(error) if isinstance(error, PatternError) else f"{type(error).__name__}: {error}"
        raise PatternError(f"{source.path}{line}: {text}") from error
    return module


def _line_in(error: BaseException, path: Path) -> str:
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f":{line}" if line else ""
