# SPDX-License-Identifier: Apache-2.0
"""Only one process at a time measures, or compiles a kernel. The others wait, then read its result.

The locks are the operating system's: one is free as soon as the process that held it ends, however
that happens. There is no collective, so no rank waits for a rank that never comes.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from coda_inductor.cache_dir import private_dir
from coda_inductor.log import logger


@contextlib.contextmanager
def lock_file(path: Path, seconds: float) -> Iterator[bool]:
    """Hold the lock of the file ``path``. Yields False if another process still holds it after
    ``seconds``, or if there can be no lock."""
    with contextlib.ExitStack() as stack:
        for file in _candidates(path):
            try:
                stack.enter_context(filelock.FileLock(file, timeout=seconds, mode=0o664))
            except filelock.Timeout:
                logger.debug("%s was held for %.0f s", file, seconds)
                break
            except (OSError, NotImplementedError):  # no folder, or a file system without locks
                continue
            yield True
            return
        yield False


def _candidates(path: Path) -> Iterator[Path]:
    """Places for the lock file, best first. The second place is local to this host, for file
    systems without locks (some Lustre and NFS mounts), or if the first is another user's."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path.with_suffix(".lock")
    with contextlib.suppress(OSError):
        locks = private_dir() / "locks"
        locks.mkdir(exist_ok=True)
        yield locks / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.lock"
