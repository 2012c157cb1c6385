# SPDX-License-Identifier: Apache-2.0
"""QuACK's folder of compiled kernels, made safe to share: where it is, what they are called, locks.

QuACK loads ``<folder>/<its sources>/<key>.o`` as machine code, under a file lock for each kernel.
Its default folder is a predictable one in the temporary directory, whoever made it, and where a
file system has no flock, it waits a minute for each kernel and then keeps none. Here

- the folder is ``kernels/<machine and versions>`` of ours;
- a kernel of ours is called by what was asked for, so that whether it is there is known before
  anything is built. QuACK hashes a pickled key, in which it matters which texts are one;
- locks are ours (``locks``): without flock, the processes of a host compile a kernel once; several
  hosts may compile it twice, and the last one's stays (files are replaced as a whole);
- kernels of a folder that can only be read are copied on first use.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import quack.cache
import quack.cache.jit

from coda_inductor.cache_dir import folder, prewarmed, private_dir, share, writable, write
from coda_inductor.locks import held
from coda_inductor.mainloop.environment import label

if TYPE_CHECKING:
    from typing_extensions import Self

_quacks: list[Callable[[tuple], str]] = []
_name = contextvars.ContextVar("name", default="")


def use() -> None:
    """Point QuACK to its folder, our names and our locks. Once a process, before the first kernel.

    Raises:
        OSError: no folder can be made.
    """
    quack.cache.jit.FileLock = KernelLock
    if not _quacks:
        _quacks.append(quack.cache.jit._key_to_hash)
        quack.cache.jit._key_to_hash = lambda key: _name.get() or _quacks[0](key)
    own = folder("kernels", label())
    if not writable(own):  # made by another user who shares the cache
        own = private_dir() / "kernels" / label()
        own.mkdir(parents=True, exist_ok=True)
    quack.cache.CACHE_ENABLED = True  # workers hand over their kernels through it
    quack.cache.CACHE_DIR = str(own)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """What QuACK compiles meanwhile is called so."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def place(name: str) -> Path:
    """Where a kernel with this name is kept: of this version of QuACK's sources."""
    cache = quack.cache.jit
    return Path(cache.get_cache_path()) / cache._compute_source_fingerprint() / f"{name}.o"


def read_only(kernel: Path) -> Path | None:
    """The file of ``kernel`` in the folder that can only be read, if it is there."""
    if (base := prewarmed()) is None:
        return None
    found = base / "kernels" / label() / kernel.parent.name / kernel.name
    return found if found.exists() else None


class KernelLock:
    """In place of QuACK's lock of one kernel, which it holds while it loads, or compiles and stores
    it. Exclusive always: loading takes milliseconds.

    Raises RuntimeError, as QuACK expects, if another process holds it for too long.
    """

    def __init__(self, lock_path: Path, exclusive: bool, timeout: float = 15):
        self._kernel, self._timeout = lock_path.with_suffix(".o"), timeout
        self._copies = exclusive
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        share(self._kernel.parent)
        if not self._held.enter_context(held(self._kernel, self._timeout)):
            raise RuntimeError(f"{self._kernel} is being compiled elsewhere")
        with contextlib.suppress(OSError):
            missing = self._copies and not self._kernel.exists()
            if missing and (source := read_only(self._kernel)) is not None:
                write(self._kernel, source.read_bytes())
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()
