"""The process that runs and proves one file: ``python -m coda_inductor.patterns.worker FILE DIGEST``.

Its last line of output is ``{"refused": why or null}``. It ends itself when its time is up; the
alarm interrupts Python code, also sympy's, and the parent's own limit is for what it cannot.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from coda_inductor.errors import PatternError
from coda_inductor.patterns.files import read, run
from coda_inductor.patterns.prove import prove
from coda_inductor.patterns.verdict import LIMIT, too_slow


class _TooSlowError(BaseException):
    """Not an Exception: a file's own handlers must not catch it."""


def verdict(path: Path, digest: str, limit: float = LIMIT) -> str | None:
    """Why the file is refused, or None."""
    doing = "running the file"

    def step(what: str) -> None:
        nonlocal doing
        doing = f"proving that {what}"

    def alarm(_number: int, _frame: FrameType | None) -> None:
        raise _TooSlowError

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        source = read(path)
        if source.digest != digest:
            return f"{path}: it changed while it was being loaded"
        for pattern in run(source):
            try:
                prove(pattern, step)
            except PatternError as error:
                return f"{path}: {error}"
    except PatternError as error:
        return str(error)
    except _TooSlowError:
        return f"{path}: {too_slow(doing)}"
    except Exception as error:
        return f"{path}: {type(error).__name__} while {doing}: {error}"
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.setitimer(signal.ITIMER_REAL, 0)
    return None


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # a file's own prints are no answer
        _refused = verdict(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps({"refused": _refused}), flush=True)  # noqa: T201 (the answer)
