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

import quack.cache
import quack.cache.jit

from coda_inductor.cache_dir import folder, prewarmed, private_dir, share, writable, write
from coda_inductor.locks import lock_file
from coda_inductor.mainloop.environment import label

_quacks_key_to_hash = quack.cache.jit._key_to_hash
_name = contextvars.ContextVar("name", default="")


def use() -> None:
    """Let QuACK use this folder, our names and our locks. Call it once, before the first kernel.
    Raises OSError if the folder cannot be created."""
    quack.cache.jit.FileLock = kernel_lock
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


def read_only(kernel: Path) -> Path | None:
    """The file of ``kernel`` in the read-only folder, or None."""
    if (base := prewarmed()) is None:
        return None
    file = base / "kernels" / label() / kernel.parent.name / kernel.name
    return file if file.exists() else None


@contextlib.contextmanager
def kernel_lock(lock_path: Path, exclusive: bool, timeout: float = 15) -> Iterator[None]:
    """Replaces QuACK's lock of one kernel, held while the kernel is loaded, or compiled and stored
    (``exclusive``). Always exclusive: loading takes milliseconds. Raises RuntimeError, as QuACK
    expects, if another process holds it for too long."""
    kernel = lock_path.with_suffix(".o")
    share(kernel.parent)
    with lock_file(kernel, timeout) as held:
        if not held:
            raise RuntimeError(f"another process is compiling {kernel}")
        with contextlib.suppress(OSError):
            missing = exclusive and not kernel.exists()
            if missing and (source := read_only(kernel)) is not None:
                write(kernel, source.read_bytes())
        yield
