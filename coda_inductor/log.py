# SPDX-License-Identifier: Apache-2.0
"""One logger, one warning a cause, and the counters that users and tests read."""

from __future__ import annotations

import logging

from coda_inductor.compat import counters, register_log

logger = logging.getLogger("coda_inductor")
register_log("coda_inductor", "coda_inductor")  # makes TORCH_LOGS="+coda_inductor" known to torch


_warned: set[tuple[str, str]] = set()


def count(pattern: str, times: int = 1) -> None:
    """Record in ``torch._dynamo.utils.counters["coda"]`` that a rewrite fired."""
    counters["coda"][pattern] += times


def warn_once(site: str, cause: str, to: str = "Inductor", first: str = "") -> None:
    """Log one warning for each (site, cause): what fell back, what ``to``, and why. ``first``
    says which of many it was, and repeats no warning."""
    if (site, cause) not in _warned:
        _warned.add((site, cause))
        logger.warning("%s falls back to %s: %s", f"{site} {first}".strip(), to, cause)


def forget_warnings() -> None:
    """Make :func:`warn_once` speak again (for tests and after ``torch._dynamo.reset()``)."""
    _warned.clear()
