# SPDX-License-Identifier: Apache-2.0
"""What is in the cache folder, and what leaves it when it grows too large.

Only files that we, or QuACK for us, have written are seen here, by their place and name: whatever
else lies in the folder is left alone. A kernel is removed under its own lock, and nothing that was
used in the last hour is: a process that has found a kernel still finds it when it loads it, and one
that has loaded it needs the file no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coda_inductor.errors import OptionError

#: GiB that the cache may take (also ``CODA_CACHE_SIZE``; 0: no limit).
LIMIT = 4.0
_HOUR = 3600.0
_STAMP = ".tidied"
_log = logging.getLogger("coda_inductor")

#: What a file that may go is called, relative to the cache folder -> its kind. Measurements are
#: small, and dear: they stay.
_KINDS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "temporary": r"(?:.*/)?(?:\.[^/]+\.[0-9a-f]{16}\.tmp|tmp[^/.]{8}\.tmp"
        r"|[0-9a-f]{64}\.o\.tmp\.\d+)",
        "kernel": r"kernels/(?:[^/]+/)?[0-9a-f]{64}/[0-9a-f]{64}\.(?:o|lock)",
        "source": r"epilogues/[0-9a-f]+[a-z_]*_v\d+\.py",
        "proof": r"proofs/[0-9a-f]{64}",
    }.items()
}


@dataclass(frozen=True)
class Entry:
    """One thing that is kept, with the files it consists of.

    Attributes:
        kind: "kernel", "source", "proof" or "temporary" (what a killed process left).
        files: of a kernel the object and its lock.
        size: bytes.
        used: when it was last used, in seconds since the epoch.
    """

    kind: str
    files: tuple[Path, ...]
    size: int
    used: float


def entries(base: Path) -> list[Entry]:
    """What of ours may go from the cache folder ``base``. Links are no files of ours."""
    found: dict[tuple[str, str], list[tuple[Path, os.stat_result]]] = {}
    for path, info in _files(base):
        name = path.relative_to(base).as_posix()
        for kind, pattern in _KINDS.items():
            if pattern.fullmatch(name):
                one = name.rsplit(".", 1)[0] if kind == "kernel" else name
                found.setdefault((kind, one), []).append((path, info))
                break
    return [
        Entry(
            kind,
            tuple(path for path, _ in files),
            sum(info.st_size for _, info in files),
            max(info.st_mtime for _, info in files),
        )
        for (kind, _), files in found.items()
    ]


def tidy(base: Path, *, now: float | None = None) -> None:
    """Remove old temporary files, and what was used least recently until the folder keeps to
    :func:`limit`. At most once an hour, for all processes together; failures are left alone."""
    now = time.time() if now is None else now
    try:
        if _age(base / _STAMP, now) < _HOUR:
            return
        (base / _STAMP).touch()
        os.utime(base / _STAMP, (now, now))
        _shrink(base, limit(), now)
    except OptionError as error:
        _warn_once(str(error))
    except OSError:
        _log.debug("the cache %s could not be tidied", base, exc_info=True)


def _shrink(base: Path, most: int | None, now: float) -> None:
    kept = sorted(entries(base), key=lambda entry: entry.used)
    total = sum(entry.size for entry in kept)
    for entry in kept:
        if now - entry.used < _HOUR:
            return
        if (entry.kind == "temporary" or (most is not None and total > most)) and remove(entry):
            total -= entry.size


def limit() -> int | None:
    """Bytes that the cache may take; None if there is no limit.

    Raises:
        OptionError: ``CODA_CACHE_SIZE`` is no number of GiB.
    """
    text = os.environ.get("CODA_CACHE_SIZE") or str(LIMIT)
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise OptionError(
            f"CODA_CACHE_SIZE={text!r} is no number of GiB, as 4 or 0.5 (0: no limit)"
        )
    return int(size * 2**30) if size else None


def remove(entry: Entry) -> bool:
    """Delete an entry's files; False if a process holds its lock or they cannot be deleted."""
    locks = [path for path in entry.files if path.suffix == ".lock"]
    try:
        with contextlib.ExitStack() as held:
            for path in locks:
                file = held.enter_context(path.open("rb"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError:
                    pass  # this file system has no locks: nobody holds one
            for path in sorted(entry.files, key=lambda path: path in locks):
                path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _files(base: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder in (base, *_folders(base)):
        with contextlib.suppress(OSError):  # another process deletes, too
            for path in list(folder.iterdir()):
                with contextlib.suppress(OSError):
                    info = path.lstat()
                    if stat.S_ISREG(info.st_mode):
                        yield path, info


def _folders(base: Path) -> list[Path]:
    """Our folders in ``base``, at any depth; links are not followed."""
    tops = (base / name for name in ("kernels", "epilogues", "proofs", "measured"))
    return [Path(folder) for top in tops if not top.is_symlink() for folder, _, _ in os.walk(top)]


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


@functools.lru_cache(maxsize=8)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
