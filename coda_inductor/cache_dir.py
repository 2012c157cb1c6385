# SPDX-License-Identifier: Apache-2.0
"""Where coda_inductor keeps generated sources, kernels and measurements between runs.

Kernels are machine code: a user who can write there can run code as this user. So a folder is used
only if no other user can have put a file into it:

- no folder on its path may be world-writable, except sticky ones such as ``/tmp``; files in a
  sticky folder must belong to this user or to root, links included;
- the default folder must belong to this user or to root. One that ``CODA_CACHE_DIR`` names may
  belong to another user and be writable by a group: whoever set the variable decided to share it.

Otherwise there is one warning, and a folder of mode 0700 under the temporary directory is used. A
read-only folder in ``CODA_CACHE_DIR`` (of a container image) is read; other files are kept where
they would be without that variable.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import secrets
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger("coda_inductor")


def cache_dir() -> Path:
    """The folder to write to and read from: ``CODA_CACHE_DIR``, else
    ``$XDG_CACHE_HOME/coda_inductor`` (default ``~/.cache``), else a private folder in the system's
    temporary directory. The folder exists, and no other user can have written to it."""
    return cache_dirs()[0]


def prewarmed() -> Path | None:
    """The folder ``CODA_CACHE_DIR``, if it can be read but not written; else None."""
    return cache_dirs()[1]


def cache_dirs() -> tuple[Path, Path | None]:
    """(:func:`cache_dir`, :func:`prewarmed`), looked up once for each state of the environment."""
    return _find(os.environ.get("CODA_CACHE_DIR", ""), os.environ.get("XDG_CACHE_HOME", ""))


@functools.lru_cache(maxsize=8)
def _find(directory: str, base: str) -> tuple[Path, Path | None]:
    if not directory:
        return _default(base), None
    try:
        path = Path(directory).expanduser().absolute()
        why = unusable(path)
    except RuntimeError as error:  # "~", and the user has no home
        why = str(error)
    if why is not None:
        fallback = _default(base)
        _warn(f"CODA_CACHE_DIR={directory} is not used: {why}. Kernels are kept in {fallback}")
        return fallback, None
    return (path, None) if writable(path) else (_default(base), path)


def unusable(path: Path, *, owned: bool = False) -> str | None:
    """Create the folder if needed. Returns the reason why it cannot be used, or why another user
    may have written to it; None if it is safe. ``owned``: it must belong to this user or to root.
    """
    try:
        _make(path, 0o700 if owned else 0o775)
        if not os.access(path, os.R_OK | os.X_OK):
            return f"{path} cannot be read"
        why = _open_to_others(path.absolute()) or _open_to_others(path.resolve())
        if why is None and owned and (owner := path.stat().st_uid) not in (0, os.geteuid()):
            return f"it belongs to user {owner} (CODA_CACHE_DIR={path} says that you trust them)"
        return why
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"


def writable(path: Path) -> bool:
    """Can files be created here? It is tried: permissions do not show read-only mounts."""
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


@functools.lru_cache(maxsize=1)
def private_dir() -> Path:
    """A folder of mode 0700 under the temporary directory that only this user can have created.
    Raises OSError if none can be created."""
    path = Path(tempfile.gettempdir()) / f"coda_inductor_uid_{os.geteuid()}"
    private = unusable(path, owned=True) is None and not path.is_symlink()
    if private and not path.stat().st_mode & 0o077:
        return path
    fresh = Path(tempfile.mkdtemp(prefix=f"{path.name}_"))
    _warn(
        f"other users can write to {path}: this process uses {fresh} instead. Set CODA_CACHE_DIR "
        "to a folder of your own"
    )
    return fresh


def folder(*names: str) -> Path:
    """The folder ``names`` in :func:`cache_dir`, created if needed. Raises OSError if it fails."""
    path = cache_dir()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been deleted since
    for name in names:
        path = path / name
        if not path.is_dir():
            path.mkdir(exist_ok=True)
            share(path)
    return path


def share(path: Path) -> None:
    """Give a folder in the cache the permissions of its parent, whatever the umask is, so that a
    shared cache stays shared and a private one stays private."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.parent.stat().st_mode) & ~(stat.S_ISVTX | stat.S_IWOTH)
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically, because processes of several containers may write it at the same
    time. Its mode follows the umask. If that fails (OSError), no partial file remains."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        share(path.parent)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # on all hosts no other's
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _default(base: str) -> Path:
    try:
        path = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "coda_inductor"
    except RuntimeError:  # the user has no home
        return private_dir()
    why = unusable(path, owned=True)
    if why is None and writable(path):
        return path
    fallback = private_dir()
    if why is not None and os.path.isdir(path):  # Path.is_dir raises below another user's home
        _warn(f"{path} is not used: {why}. Kernels are kept in {fallback}")
    return fallback


def _make(path: Path, mode: int) -> None:
    """Create a folder and its parents; not world-writable, even with a umask of 0."""
    if not path.is_dir():
        _make(path.parent, mode)
        path.mkdir(mode=mode, exist_ok=True)


def _open_to_others(path: Path) -> str | None:
    """The reason why another user may have created or changed ``path``, or None. If it is a link,
    its target is checked as well."""
    in_sticky = False
    for part in (*reversed(path.parents), path):
        info = part.lstat()
        if in_sticky and info.st_uid not in (0, os.geteuid()):
            return f"every user can create {part}, and user {info.st_uid} did"
        link = stat.S_ISLNK(info.st_mode)
        everybody = bool(info.st_mode & stat.S_IWOTH) and not link
        in_sticky = everybody and bool(info.st_mode & stat.S_ISVTX)
        if everybody and (part == path or not in_sticky):
            return f"every user can write to {part} (chmod o-w it, or choose another folder)"
    return None


def _warn(text: str) -> None:
    if multiprocessing.parent_process() is None:  # compile workers would repeat it
        _log.warning("%s", text)
