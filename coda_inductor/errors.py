# SPDX-License-Identifier: Apache-2.0
"""All errors that a user can see, one class each, so that callers can catch exactly one kind.

Leaf module: imports nothing of ours.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class CodaError(Exception):
    """Base of all errors raised by coda_inductor."""


class OptionError(CodaError, ValueError):
    """An option of ``torch.compile(..., options=...)`` is unknown or has a bad value."""


class PatternError(CodaError, ValueError):
    """A pattern file is missing, does not load or is malformed."""


class ProgramError(CodaError, ValueError):
    """An epilogue program is not legal; the message names the operand, step or output."""


class KernelError(CodaError, RuntimeError):
    """A generated kernel could not be rendered, compiled or launched."""


class FallbackError(CodaError, RuntimeError):
    """Raised instead of a fallback when ``options={"strict": True}``."""


class ExplainError(CodaError, RuntimeError):
    """:func:`coda_inductor.explain` cannot trace the model; the message says why."""


def suggest(name: Any, names: Iterable[str]) -> str:
    """A hint with up to three of ``names`` that the user may have meant; empty if none is close."""
    close = difflib.get_close_matches(str(name), names, n=3)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
