# SPDX-License-Identifier: Apache-2.0
"""What is kept between runs: where, how much of it, and deleting it.

show lists it by kind and version; clear deletes it, or what was not used for some days. Only files
that coda_inductor has written are counted and deleted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tabulate import tabulate

from coda_inductor import cache_contents
from coda_inductor.cache_dir import cache_dir, prewarmed
from coda_inductor.errors import CodaError

HELP = "show or clear what is kept between runs"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("show", help="where it is, how many entries of what kind, their size")
    clear = actions.add_parser("clear", help="delete it; what a process is using stays")
    clear.add_argument(
        "--older", type=_days, metavar="DAYS", help="only what was not used for so many days"
    )


def run(chosen: argparse.Namespace) -> int:
    """Show or clear the cache; 0.

    Raises:
        CodaError: what is to be cleared is not the folder that ``CODA_CACHE_DIR`` names.
    """
    if chosen.action == "clear":
        _same_folder()
        count, size = cache_contents.clear(cache_dir(), older=chosen.older)
        sys.stdout.write(f"{cache_dir()}: {count} entries deleted, {_size(size)}\n")
        return 0
    most = cache_contents.limit()
    kept = "no limit" if most is None else f"at most {_size(most)}"
    _show(cache_dir(), f"{kept} (CODA_CACHE_SIZE, in GiB)")
    read_only = prewarmed()
    if read_only is not None:
        _show(read_only, "can only be read")
    if folder := os.environ.get("QUACK_CACHE_DIR"):
        sys.stdout.write(f"QUACK_CACHE_DIR={folder} has the kernels; clear does not touch it\n")
    return 0


def _same_folder() -> None:
    """Is what would be cleared what the user has named? Where that cannot be used, all else goes on
    in another folder, but nobody has asked to delete that one's files."""
    named = os.environ.get("CODA_CACHE_DIR")
    if named and prewarmed() is None and cache_dir() != Path(named).expanduser().absolute():
        raise CodaError(
            f"CODA_CACHE_DIR={named} is not used, so nothing was deleted; without that variable, "
            f"{cache_dir()} is cleared"
        )


def _show(base: Path, note: str) -> None:
    groups: dict[tuple[str, str], list[cache_contents.Entry]] = {}
    for entry in cache_contents.entries(base):
        groups.setdefault((entry.kind, entry.version), []).append(entry)
    now = time.time()
    rows = [
        (
            kind,
            version,
            len(found),
            _size(sum(entry.size for entry in found)),
            f"{(now - max(entry.used for entry in found)) / 86400:.1f}",
        )
        for (kind, version), found in sorted(groups.items())
    ]
    sys.stdout.write(f"{base}: {note}\n")
    headers = ("kind", "version", "entries", "size", "days since last use")
    text = tabulate(rows, headers, disable_numparse=True, colalign=("left", "left", *["right"] * 3))
    sys.stdout.write(f"\n{text}\n\n" if rows else "nothing is kept there\n")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days")
    return days
