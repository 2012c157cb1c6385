# SPDX-License-Identifier: Apache-2.0
"""May a file be loaded? Its proof, done once for each content, in a process that may hang.

A new file is first run and proven in a separate process, which is ended when its time is up; only
then is it run in this one. The verdict is remembered by the content of the file and of the prover:
in this process, and for proven files on disk (``proofs/`` in the cache directory). The verdicts of
the built-in files are shipped in ``proven.json``, so that they cost nothing; a test keeps it
up to date, and an edited built-in file is proven like any other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from pathlib import Path

import sympy
import torch

from coda_inductor.cache_dir import cache_dir, write
from coda_inductor.errors import PatternError
from coda_inductor.patterns.source import Source
from coda_inductor.processes.child import Child, EndedError, LateError

#: Seconds that running and proving one file may take; most take 3 to 6.
LIMIT = 60.0
#: Bytes that it may take besides torch and sympy: the built-in files take 5 MB, the largest file
#: that was seen 3.4 GB.
MEMORY = 4 << 30
_START = 60  # seconds for a process to import torch, on a busy machine
_FOLDER = Path(__file__).resolve().parent
SHIPPED = _FOLDER / "proven.json"


def require_proof(source: Source) -> None:
    """Return if the file is proven, now or before.

    Raises:
        PatternError: it cannot be run or proven, or takes longer than :data:`LIMIT`.
    """
    if source.digest not in _shipped() and (why := refusal(source)) is not None:
        raise PatternError(why)


@functools.lru_cache(maxsize=256)
def refusal(source: Source) -> str | None:
    """Why the file is refused, or None. A proof is kept on disk."""
    if _recorded(source):
        return None
    if (why := _prove_elsewhere(source)) is None:
        record(source)
    return why


def record(source: Source) -> None:
    """Remember that the file is proven."""
    with contextlib.suppress(OSError):  # without a writable cache it only takes longer
        write(cache_dir() / "proofs" / _key(source), _record(source))


def _recorded(source: Source) -> bool:
    """Is there a valid, readable record on disk?"""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (cache_dir() / "proofs" / _key(source)).read_text() == _record(source)
    return False


def _record(source: Source) -> str:
    return f"{_key(source)} is proven\n"


def _key(source: Source) -> str:
    return hashlib.sha256(f"{source.digest} {_prover()}".encode()).hexdigest()


def _prove_elsewhere(source: Source) -> str | None:
    """Why the file is refused, or None."""
    deadline = time.monotonic() + _START + LIMIT
    # Its own threads would count as memory: their stacks and arenas are address space.
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        child = Child("coda_inductor.patterns.worker", environment=environment)
    except OSError as error:
        return f"{source.path}: no process could be started to prove it: {error}"
    try:
        asked = {"path": str(source.path), "text": source.text, "digest": source.digest}
        return child.ask({**asked, "seconds": LIMIT}, deadline)["refused"]
    except LateError:
        return f"{source.path}: {too_slow('it did not answer', LIMIT)}"
    except EndedError as error:
        how = f"ended with {error.code}: {error.words or 'nothing'}"
        return f"{source.path}: the process that proves it {how}"
    finally:
        child.end()


def too_slow(doing: str, seconds: float) -> str:
    """The refusal of a file that takes too long."""
    return (
        f"loading and proving it takes longer than {seconds:g} s ({doing}). Write the meaning with "
        "fewer functions"
    )


@functools.lru_cache(maxsize=1)
def _prover() -> str:
    """What a proof depends on besides the file."""
    rooms = ("patterns", "semantic", "matching")
    sources = [p for room in rooms for p in sorted((_FOLDER.parent / room).glob("*.py"))]
    text = "".join(hashlib.sha256(p.read_bytes()).hexdigest() for p in sources)
    return f"{text} {sympy.__version__} {torch.__version__}"


@functools.lru_cache(maxsize=1)
def _shipped() -> frozenset[str]:
    return frozenset(json.loads(SHIPPED.read_text()).values()) if SHIPPED.is_file() else frozenset()
