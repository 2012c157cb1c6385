# SPDX-License-Identifier: Apache-2.0
"""A progress bar for work that takes more than some seconds, on a terminal but not in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

#: Seconds that work may take before anything is shown.
AFTER = 3.0
_bar_lock = threading.Lock()  # a terminal has room for one


@contextlib.contextmanager
def show_progress(title: str, work: Sequence[Future]) -> Iterator[None]:
    """Show which share of ``work`` is done; of several ranks, only the first shows it."""
    visible = work and os.environ.get("LOCAL_RANK", "0") == "0" and sys.stderr.isatty()
    if not (visible and _bar_lock.acquire(blocking=False)):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(f"coda: {title}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=len(work))
    for future in work:
        future.add_done_callback(lambda _: bar.advance(task))
    timer = threading.Timer(AFTER, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()
        _bar_lock.release()
