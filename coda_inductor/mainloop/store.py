# SPDX-License-Identifier: Apache-2.0
"""QuACK's folder of compiled kernels, made safe to share: where it is, locks, checksums.

QuACK loads ``<folder>/<its sources>/<key>.o`` as machine code, under a file lock for each kernel.
Its default folder is a predictable one in the temporary directory, whoever made it, and where a
file system has no flock (some Lustre and NFS mounts), it waits a minute for each kernel and then
keeps none. Here

- the folder is ``kernels/<machine and versions>`` of ours, unless ``QUACK_CACHE_DIR`` names one
  that nobody else can have written to;
- flock is tried once a folder. Where it does not work, or the lock is another user's file, the
  lock file lies in a private folder of this host: its processes still compile a kernel once;
  several hosts may compile it twice, and the last one's stays (files are replaced as a whole);
- a kernel's checksum is kept beside it (``<key>.sum``) and looked at before it is loaded: one that
  differs is compiled again;
- kernels of a folder that can only be read are copied on first use;
- a kernel's name depends on what its key says, and not, as with QuACK, on which equal texts in it
  are one object: workers, this process and the next one find each other's kernels.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import quack.cache
import quack.cache.jit

from coda_inductor import cache_contents
from coda_inductor.cache_dir import (
    TAG,
    folder,
    prewarmed,
    private_dir,
    share,
    temporary,
    unusable,
    writable,
    write,
)
from coda_inductor.log import logger
from coda_inductor.mainloop.environment import label

if TYPE_CHECKING:
    from typing_extensions import Self


#: What the modules of generated epilogues are called.
PREFIX = "coda_inductor_epilogue_"


def use() -> None:
    """Point QuACK to its folder and to our locks. Once a process, before the first kernel."""
    quack.cache.jit.FileLock = KernelLock
    if quack.cache.jit._key_to_hash is not key_to_hash:
        _quacks.append(quack.cache.jit._key_to_hash)
        quack.cache.jit._key_to_hash = key_to_hash
    chosen = quack.cache.CACHE_DIR
    if chosen is not None:
        why = unusable(Path(chosen).absolute())
        if why is None and not writable(Path(chosen)):
            why = "it cannot be written to"
        if why is None:
            return
    own = folder("kernels", label())
    if not writable(own):  # made by another user who shares the cache
        own = private_dir() / "kernels" / label()
        own.mkdir(parents=True, exist_ok=True)
    if chosen is not None:
        logger.warning("QUACK_CACHE_DIR=%s is not used: %s. Kernels are kept in %s",
                       chosen, why, own)  # fmt: skip
    quack.cache.CACHE_DIR = str(own)


_quacks: list[Callable[[tuple], str]] = []


def key_to_hash(key: tuple) -> str:
    """The name of a kernel. That of one that is not ours is QuACK's: the hash of its pickled key,
    in which a text that stands there twice is written twice or referred to, by identity."""
    if not any(PREFIX in str(getattr(part, "module", "")) for part in key[:2]):
        return _quacks[0](key)
    text = io.BytesIO()
    pickler = pickle.Pickler(text, protocol=4)
    pickler.fast = True  # no references
    pickler.dump(key)
    return hashlib.sha256(text.getvalue()).hexdigest()


def copy_markers(codegen: str) -> None:
    """Let the compile pool know what is in the folder that can only be read: a marker says that a
    kernel is there, and where."""
    source = _read_only()
    if source is None or quack.cache.CACHE_DIR is None:
        return
    with contextlib.suppress(OSError):
        for marker in source.glob(f"*/coda_{codegen}/*"):
            version = marker.parent.parent.name
            target = Path(quack.cache.CACHE_DIR) / version / marker.parent.name / marker.name
            if not target.exists():
                write(target, str(source / version / Path(marker.read_text()).name))


class KernelLock(quack.cache.FileLock):
    """QuACK's lock of one kernel, which QuACK holds while it loads, or compiles and stores, it.

    Raises RuntimeError, as QuACK expects, if another process holds it for too long.
    """

    lock_path: Path

    def __enter__(self) -> Self:
        self._kernel = self.lock_path.with_suffix(".o")
        #: The cache folder, if it is one of ours; ``QUACK_CACHE_DIR`` is not.
        self._base = next((p for p in self._kernel.parents if (p / TAG).is_file()), None)
        if self._base is not None:
            share(self._kernel.parent)
        for path in self._paths():
            self.lock_path = path
            try:
                super().__enter__()
                break
            except OSError:  # RuntimeError, a lock that stays taken, is for QuACK
                continue
        with contextlib.suppress(OSError):
            self._check()
        self._before = _identity(self._kernel)
        return self

    def __exit__(self, *exc: object) -> None:
        stored = self.exclusive and _identity(self._kernel) not in (None, self._before)
        try:
            if stored:
                with contextlib.suppress(OSError):
                    write(self._sum, _digest(self._kernel))
        finally:
            super().__exit__(*exc)
        if stored and self._base is not None:
            cache_contents.tidy(self._base)

    @property
    def _sum(self) -> Path:
        return self._kernel.with_suffix(".sum")

    def _paths(self) -> Iterator[Path]:
        """Where the lock file may lie, best first."""
        if flock_works(self.lock_path.parent):
            yield self.lock_path
        with contextlib.suppress(OSError):
            locks = private_dir() / "locks"
            locks.mkdir(exist_ok=True)
            yield locks / f"{hashlib.sha256(str(self._kernel).encode()).hexdigest()[:32]}.lock"

    def _check(self) -> None:
        """Drop a kernel that is not what was stored; take one from the folder that can only be
        read; note that it is in use."""
        if not self._kernel.exists():
            source = _read_only()
            if source is None or not self.exclusive:
                return
            _copy(source / self._kernel.parent.name / self._kernel.name, self._kernel)
        if self._sum.exists() and self._sum.read_text() != _digest(self._kernel):
            logger.warning("%s is damaged: its kernel is compiled again", self._kernel)
            self._kernel.unlink()
            self._sum.unlink()
            return
        os.utime(self._kernel)


@functools.lru_cache(maxsize=64)
def flock_works(path: Path) -> bool:
    """Are there file locks in this folder? Tried once."""
    probe = temporary(path / "flock")
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(handle)
            probe.unlink()
    except OSError:
        return False
    return True


def _read_only() -> Path | None:
    """The kernels of the folder that can only be read, of this machine and these versions."""
    base = prewarmed()
    return None if base is None else base / "kernels" / label()


def _copy(source: Path, target: Path) -> None:
    """Take over a kernel and its checksum: the kernel last, and as a whole.

    Raises:
        OSError: it is not there, or cannot be copied.
    """
    for suffix in (".sum", ".o"):
        write(target.with_suffix(suffix), source.with_suffix(suffix).read_bytes())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_size
