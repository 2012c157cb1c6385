# SPDX-License-Identifier: Apache-2.0
"""What leaves the cache folder when it grows too large: the kernels that were not used for longest.

Sources, proofs and measurements are small, and stay. Only files that we, or QuACK for us, have
written are seen, by their place and name: whatever else lies in the folder is left alone. A kernel
is removed under its own lock, and nothing that was used in the last hour is: a process that has
found a kernel still finds it when it loads it, and one that has loaded it needs the file no more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from coda_inductor.errors import OptionError

#: GiB that kernels may take (also ``CODA_CACHE_SIZE``; 0: no limit).
LIMIT = 4.0
_HOUR = 3600.0
_STAMP = ".tidied"
_log = logging.getLogger("coda_inductor")
#: What a file that may go is called, below ``kernels``: a kernel, or what a killed process left.
_KERNEL = re.compile(r"(?:[^/]+/)?[0-9a-f]{64}/[0-9a-f]{64}\.o")
_TEMPORARY = re.compile(
    r"(?:.*/)?(?:\.[^/]+\.[0-9a-f]{16}\.tmp|tmp[^/.]{8}\.tmp|[0-9a-f]{64}\.o\.tmp\.\d+)"
)


def tidy(base: Path, *, now: float | None = None) -> None:
    """Remove old temporary files, and the kernels that were used least recently until they keep to
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


def _shrink(base: Path, most: float, now: float) -> None:
    found = sorted(_files(base / "kernels"))
    total = sum(size for _, size, _ in found)
    for used, size, path in found:
        if now - used < _HOUR:
            return
        if (path.suffix != ".o" or total > most) and _removed(path):
            total -= size


def limit() -> float:
    """Bytes that kernels may take.

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
    return size * 2**30 or float("inf")


def _removed(path: Path) -> bool:
    """Delete a file and its lock; False if a process holds that or they cannot be deleted."""
    lock = filelock.FileLock(path.with_suffix(".lock"), timeout=0)
    try:
        with contextlib.ExitStack() as held:
            with contextlib.suppress(NotImplementedError):  # no locks here: nobody holds one
                held.enter_context(lock)
            path.unlink(missing_ok=True)
            Path(lock.lock_file).unlink(missing_ok=True)
    except OSError:  # filelock.Timeout is one
        return False
    return True


def _files(kernels: Path) -> Iterator[tuple[float, int, Path]]:
    """(last use, bytes, path) of each of ours; links are not followed."""
    for folder, _, names in () if kernels.is_symlink() else os.walk(kernels):
        for path in (Path(folder, name) for name in names):
            name = str(path.relative_to(kernels))
            with contextlib.suppress(OSError):  # another process deletes, too
                info = path.lstat()
                if stat.S_ISREG(info.st_mode) and (
                    _KERNEL.fullmatch(name) or _TEMPORARY.fullmatch(name)
                ):
                    yield info.st_mtime, info.st_size, path


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


@functools.lru_cache(maxsize=8)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
