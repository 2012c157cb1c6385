# SPDX-License-Identifier: Apache-2.0
"""Pattern files: their places, text and patterns. Each is run, and its claims compared, alone.

The places, in the order in which patterns are tried: ``options["patterns"]`` (or
``CODA_PATTERNS``), files from :func:`load_patterns`, and the built-in ones, which are in
``patterns/`` of the repository and in the wheel. All are loaded in the same way, but built-in ones
are not compared: tests prove them.
"""

import functools
import hashlib
import itertools
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from coda_inductor.errors import PatternError
from coda_inductor.log import say_once
from coda_inductor.patterns.compare import compare
from coda_inductor.patterns.meaning import DIGEST
from coda_inductor.patterns.pattern import Pattern

#: Counters without a pattern file, less "_backward"; a test compares them with the pipeline's.
OTHER_NAMES = (
    "adapter_dropout", "block_mask", "collective", "concatenated", "constant_mask", "cross_entropy",
    "embedding", "epilogue", "experts", "fp8_linear", "fp8_quantize", "fp8_product",
    "grouped_heads", "residual",
)  # fmt: skip

_registered: dict[Path, None] = {}  # the files of load_patterns, in order


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
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == str(source.path)]
        line = [getattr(error, "lineno", None), *own][-1]
        where = f"{source.path}:{line}" if line else source.path
        text = str(error) if isinstance(error, PatternError) else f"{type(error).__name__}: {error}"
        raise PatternError(f"{where}: {text}") from error
    return module


def builtin_folder() -> Path:
    """The folder of the shipped pattern files: in the installed package, else in the checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_patterns", package.parent / "patterns"):
        if folder.is_dir():
            return folder
    raise PatternError(f"no built-in pattern files next to {package}: reinstall coda-inductor")


def load_file(path: str | Path) -> tuple[Pattern, ...]:
    """Load one pattern file: read it, run it, and compare its claims on numbers.

    Raises:
        PatternError: the file is missing, fails to run, defines no pattern, or has a claim that
            does not hold. The message names file and line, or the inputs and the difference.
    """
    return _load(read(Path(path)))


@functools.lru_cache(maxsize=256)
def _load(source: Source) -> tuple[Pattern, ...]:
    patterns = run(source)
    for pattern in () if _builtin(source.path) else patterns:
        if refusal := name_taken(source.path, pattern.name):
            raise PatternError(f"{source.path}: {refusal}")
        try:
            compare(pattern)
        except PatternError as error:
            raise PatternError(f"{source.path}: {error}") from error
    return patterns


def _builtin(path: Path) -> bool:
    return path.resolve().parent == builtin_folder().resolve()


def name_taken(path: Path, name: str) -> str | None:
    """The reason why a pattern of the file ``path`` may not have this name, or None. Counters,
    reports and ``options["disable"]`` could not distinguish two rewrites with one name."""
    if _builtin(path) or name not in builtin_names():
        return None
    return (
        f"pattern {name}: that is the name of a built-in rewrite. Choose another one; to replace "
        f"the built-in one, also disable it: options={{'disable': [{name!r}]}}"
    )


@functools.lru_cache(maxsize=1)
def builtin_names() -> frozenset[str]:
    """The names of this package's rewrites in counters, reports and ``disable``."""
    files = builtin_folder().glob("*.py")
    names = {*OTHER_NAMES, *(p.name for file in files for p in load_file(file))}
    return frozenset(names | {f"{name}_backward" for name in names})


def load_patterns(path: str | Path, *, strict: bool = False) -> tuple[Pattern, ...]:
    """Add a pattern file, or every ``*.py`` of a folder, for this process; returns their patterns.

    Models that are compiled from now on use them, before the built-in ones. A file that is named
    twice is used once. If a file of a folder does not load, there is one warning, and the others
    load; with ``strict`` it raises, and nothing is added.

    Raises:
        PatternError: ``path`` does not exist, or the one file that it names does not load.
    """
    path = Path(path).resolve()
    patterns = _load_all(expand(path), strict=strict or path.is_file())
    _registered.update(dict.fromkeys(patterns))
    return tuple(itertools.chain(*patterns.values()))


def load(extra: tuple[str, ...] = (), *, strict: bool = True) -> tuple[Pattern, ...]:
    """All patterns in use, in the order in which they are tried. An edited file is read again.

    Without ``strict``, if a file does not load, there is one warning, and the others load.

    Raises:
        PatternError: with ``strict``, as :func:`load_file`; or a file of ``extra`` does not exist.
    """
    loaded = _load_all(files(extra), strict=strict)
    places: dict[str, list[str]] = {}
    for path, patterns in loaded.items():
        for pattern in patterns:
            places.setdefault(pattern.name, []).append(str(path))
    for name, paths in places.items():
        if len(paths) > 1:
            say_once(f"{name!r} is the name of {len(paths)} patterns, which counters and the "
                     f"option 'disable' cannot tell apart: {', '.join(paths)}")  # fmt: skip
    return tuple(itertools.chain(*loaded.values()))


def _load_all(files: Iterable[Path], *, strict: bool) -> dict[Path, tuple[Pattern, ...]]:
    patterns = {}
    for file in files:
        try:
            patterns[file] = load_file(file)
        except PatternError as error:
            if strict:
                raise
            say_once(f"{error}. The file is left out; the others are used")
    return patterns


def files(extra: tuple[str, ...] = ()) -> tuple[Path, ...]:
    """All pattern files in use, each once, in the order in which they are tried (cache keys cover
    their content). ``extra`` are files and folders.

    Raises:
        PatternError: a file or folder of ``extra`` does not exist.
    """
    extras = [file for path in extra for file in expand(Path(path))]
    ordered = (*extras, *_registered, *sorted(builtin_folder().glob("*.py")))
    unique: dict[Path, Path] = {}
    for file in ordered:
        unique.setdefault(file.resolve(), file)
    return tuple(unique.values())


def expand(path: Path) -> list[Path]:
    """The pattern files of ``path``: the file itself, or all in the folder.

    Raises:
        PatternError: there is none.
    """
    if path.is_dir():
        files = [p for p in sorted(path.glob("*.py")) if p.name != "__init__.py"]
        if not files:
            raise PatternError(f"no pattern files (*.py) in the folder {path}")
        return files
    if not path.is_file():
        raise PatternError(f"no such pattern file: {path}")
    return [path]
