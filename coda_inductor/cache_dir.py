"""Where coda_inductor keeps generated sources, compiled kernels and measurements between runs."""

from __future__ import annotations

import functools
import os
import tempfile
from getpass import getuser
from pathlib import Path


@functools.lru_cache(maxsize=1)
def cache_dir() -> Path:
    """``CODA_CACHE_DIR``, else ``$XDG_CACHE_HOME/coda_inductor`` (``~/.cache``), else, where that
    cannot be written, a folder of this user under the system's temporary directory. Created."""
    chosen = os.environ.get("CODA_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            path = Path(chosen).expanduser()
        else:
            path = (Path(base) if base else Path.home() / ".cache") / "coda_inductor"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        pass
    path = Path(tempfile.gettempdir()) / f"coda_inductor_{_user()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, text: str) -> None:
    """Atomic, for several processes, of several containers, may write one file at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _user() -> str:
    try:
        return getuser()
    except (OSError, KeyError):  # a container's user id need not have a name
        return f"uid_{os.getuid()}"
