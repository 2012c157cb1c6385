# SPDX-License-Identifier: Apache-2.0
"""QuACK's folder of compiled kernels, made safe to share: its place, file names, and locks.

QuACK loads ``<folder>/<its sources>/<key>.o`` as machine code, under a file lock for each kernel.
Any user may have created its default folder, which is in the temporary directory, and on a file
system without flock it waits a minute for each kernel and then keeps none. Here

- the folder is ``kernels/<machine and versions>`` of ours;
- a kernel's name comes from its request, so that one can check for it before anything is built;
- locks are ours (``locks``): without flock, the processes of a host compile a kernel once;
- kernels of a read-only folder are copied on first use.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import quack.cache
import quack.cache.jit

from coda_inductor.cache_dir import folder, prewarmed, private_dir, share, writable, write
from coda_inductor.locks import lock_file
from coda_inductor.mainloop.environment import label

if TYPE_CHECKING:
    from typing_extensions import Self

_quacks_key_to_hash = quack.cache.jit._key_to_hash
_name = contextvars.ContextVar("name", default="")


def use() -> None:
    """Let QuACK use this folder, our names and our locks. Call it once, before the first kernel.
    Raises OSError if the folder cannot be created."""
    quack.cache.jit.FileLock = KernelLock
    quack.cache.jit._key_to_hash = lambda key: _name.get() or _quacks_key_to_hash(key)
    path = folder("kernels", label())
    if not writable(path):  # created by another user of a shared cache
        path = private_dir() / "kernels" / label()
        path.mkdir(parents=True, exist_ok=True)
    quack.cache.CACHE_ENABLED = True  # workers pass their kernels through it
    quack.cache.CACHE_DIR = str(path)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """A context in which kernels that QuACK compiles get this name."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def kernel_path(name: str) -> Path:
    """The path of a kernel with this name, for this version of QuACK's sources."""
    cache = quack.cache.jit
    return Path(cache.get_cache_path()) / cache._compute_source_fingerprint() / f"{name}.o"


def read_only(kernel: Path) -> Path | None:
    """The file of ``kernel`` in the read-only folder, or None."""
    if (base := prewarmed()) is None:
        return None
    file = base / "kernels" / label() / kernel.parent.name / kernel.name
    return file if file.exists() else None


class KernelLock:
    """Replaces QuACK's lock of one kernel, held while the kernel is loaded, or compiled and stored.
    Always exclusive: loading takes milliseconds. Raises RuntimeError, as QuACK expects, if another
    process holds it for too long."""

    def __init__(self, lock_path: Path, exclusive: bool, timeout: float = 15):
        self._kernel, self._timeout = lock_path.with_suffix(".o"), timeout
        self._copies = exclusive
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Self":
        share(self._kernel.parent)
        if not self._held.enter_context(lock_file(self._kernel, self._timeout)):
            raise RuntimeError(f"another process is compiling {self._kernel}")
        with contextlib.suppress(OSError):
            missing = self._copies and not self._kernel.exists()
            if missing and (source := read_only(self._kernel)) is not None:
                write(self._kernel, source.read_bytes())
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()
