# SPDX-License-Identifier: Apache-2.0
"""One logger, one warning per cause and host, and the counters that users and tests read."""

import contextlib
import hashlib
import logging
import os

import torch.distributed as dist

from coda_inductor import compat
from coda_inductor.compat import default_store, register_log

logger = logging.getLogger("coda_inductor")
register_log("coda_inductor", "coda_inductor")  # makes TORCH_LOGS="+coda_inductor" known to torch


def _name_and_rank(record: logging.LogRecord) -> bool:
    """Add the package and the rank to a warning. Returns False for a duplicate. Of several ranks of
    a host with one warning the first one logs it (if their process group has a store)."""
    if record.levelno < logging.WARNING:
        return True
    text = record.getMessage().removeprefix("coda_inductor: ")
    rank = ""
    if dist.is_available() and dist.is_initialized():
        rank = f" [rank {dist.get_rank()}]"
        host = os.environ.get("GROUP_RANK", "0")
        key = f"coda_inductor/{host}/{hashlib.sha256(text.encode()).hexdigest()}"
        with contextlib.suppress(Exception):  # the store is gone: each rank logs it
            if default_store().add(key, 1) > 1:
                return False
    record.msg, record.args = f"coda_inductor{rank}: {text}", ()
    return True


logger.addFilter(_name_and_rank)


_warned: set[tuple[str, str]] = set()


def count(pattern: str, times: int = 1) -> None:
    """Record in ``torch._dynamo.utils.counters["coda"]`` that a rewrite fired."""
    compat.counters["coda"][pattern] += times  # imports Dynamo, which compile workers do not need


def warn_once(site: str, cause: str, to: str = "Inductor", first: str = "") -> None:
    """Log one warning for each (site, cause): what falls back ``to`` which backend, and why.
    ``first`` names the first of many sites; another value of it does not repeat the warning."""
    if (site, cause) not in _warned:
        _warned.add((site, cause))
        logger.warning("%s falls back to %s: %s", f"{site} {first}".strip(), to, cause)


def say_once(text: str) -> None:
    """Log one warning for each ``text``."""
    if ("", text) not in _warned:
        _warned.add(("", text))
        logger.warning("%s", text)


def forget_warnings() -> None:
    """Let all warnings appear again (for tests and after ``torch._dynamo.reset()``)."""
    _warned.clear()
