# SPDX-License-Identifier: Apache-2.0
"""The process that runs and proves one file: a child (``processes``).

``{"path": ..., "text": ..., "digest": ..., "seconds": ...}`` answers ``{"refused": why or null}``.
It refuses a file that is not done in time: an alarm interrupts Python code, also sympy's, and the
parent's own limit covers the rest. Its memory is limited too, because sympy may use all of it
before the time is up.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from coda_inductor.errors import PatternError
from coda_inductor.patterns.pattern import Pattern
from coda_inductor.patterns.prove import prove
from coda_inductor.patterns.source import Source, run
from coda_inductor.patterns.verdict import LIMIT, MEMORY, too_slow
from coda_inductor.processes.start import Messages


class _TooSlowError(BaseException):
    """Not an Exception: a file's own handlers must not catch it."""


Told = Callable[[str, str], None]


def patterns_of(
    source: Source, told: Told = lambda *_: None, seconds: float = LIMIT
) -> list[Pattern]:
    """Run a file and prove its patterns, in this thread, which must be the main one.

    ``told`` is called with (pattern, claim) before the proof of each.

    Raises:
        PatternError: it does not run, is not proven, or takes longer than ``seconds``.
    """
    doing = "running the file"

    def step(pattern: str, claim: str) -> None:
        nonlocal doing
        doing = f"proving {pattern}: {claim}"
        told(pattern, claim)

    def alarm(_number: int, _frame: FrameType | None) -> None:
        raise _TooSlowError

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        found = list(run(source))
        for pattern in found:
            try:
                prove(pattern, functools.partial(step, pattern.name))
            except PatternError as error:
                raise PatternError(f"{source.path}: {error}") from error
        return found
    except _TooSlowError:
        raise PatternError(f"{source.path}: {too_slow(doing, seconds)}") from None
    except PatternError:
        raise
    except Exception as error:
        raise PatternError(
            f"{source.path}: {type(error).__name__} while {doing}: {error}"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(parent: Messages) -> None:
    """Run the process: limit its memory, prove, answer."""
    _limit_memory(MEMORY)
    asked = parent.recv()
    source = Source(Path(asked["path"]), asked["text"], asked["digest"])
    parent.send({"refused": refused(source, asked["seconds"])})


def refused(source: Source, seconds: float) -> str | None:
    """Why the file is refused, or None."""
    try:
        patterns_of(source, seconds=seconds)
    except PatternError as error:
        return str(error)
    return None


def _limit_memory(more: int) -> None:
    """Let this process take at most ``more`` additional bytes of address space."""
    try:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        if most == resource.RLIM_INFINITY or now + more < most:
            resource.setrlimit(resource.RLIMIT_AS, (now + more, most))
    except (ImportError, OSError, ValueError):
        pass  # not on Linux: only the time limit applies
