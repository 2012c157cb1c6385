# SPDX-License-Identifier: Apache-2.0
"""Compile workers as this process sees them: started, asked, ended.

Each is a child (``processes``) with a thread here that asks it for one kernel after another.
Torch's pool for Inductor's compilers cannot end a single job, and looks for its parent once a
minute.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from concurrent.futures import Future
from typing import Any

from coda_inductor.cache_dir import cache_dir
from coda_inductor.log import logger
from coda_inductor.processes.child import Child, EndedError, LateError

_MODULE = "coda_inductor.runtime.worker"
_MOST = 16  # workers of all ranks of a host, unless CODA_COMPILE_WORKERS says more of one
#: Seconds without work after which a worker ends: it holds a third of a gigabyte.
_IDLE = 120.0
_HOUR = 3600.0


class Compilers:
    """Workers for kernels of ``arch``, a compute capability such as "90"; as many as there is work,
    at most :func:`workers`. Nothing here waits for one, but ``end``, for two seconds."""

    def __init__(self, arch: str):
        self._arch = arch
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future, Any] | None] = queue.SimpleQueue()
        self._threads = self._open = 0  # of the latter, futures without a result
        self._running: dict[Future, Child | None] = {}
        self.children: set[Child] = set()

    def start(self, count: int) -> None:
        """Have so many workers, if that many may be: they import for seconds."""
        with self._lock:
            for _ in range(self._threads, min(count, max(1, workers()))):
                self._threads += 1
                threading.Thread(target=self._serve, name="coda compiler", daemon=True).start()

    def submit(self, message: Any) -> Future:
        """Ask for a kernel, as ``worker.main`` says. The result is an error text or None."""
        future: Future = Future()
        with self._lock:
            self._open += 1
            self._jobs.put((future, message))
        self.start(self._open)
        return future

    def drop(self, future: Future) -> None:
        """Compile it no longer."""
        with self._lock:
            child = self._running.pop(future, None)
        if not future.cancel() and child is not None:
            child.end()

    def end(self) -> None:
        """End all workers."""
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        with self._lock:
            self._running.clear()
            for _ in range(self._threads):
                self._jobs.put(None)
        for child in list(self.children):
            child.end()

    def abandon(self) -> None:
        """In a fork of this process: see :meth:`Child.abandon`."""
        for child in self.children:
            child.abandon()

    def _serve(self) -> None:
        """A thread's life."""
        child = None
        with contextlib.suppress(OSError):  # the first job says it
            child = self._start()
        while (job := self._next()) is not None:
            future, message = job
            if future.set_running_or_notify_cancel():
                child, answer = self._compiled(child, future, message)
                future.set_result(answer)
            with self._lock:
                self._open -= 1
        if child is not None:
            self._end(child)

    def _next(self) -> tuple[Future, Any] | None:
        while True:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=_IDLE)
                if job is not None:
                    return job
            with self._lock:
                if self._jobs.empty():
                    self._threads -= 1
                    return None

    def _compiled(
        self, child: Child | None, future: Future, message: Any
    ) -> tuple[Child | None, str | None]:
        """(a worker for the next job, the answer). Where one dies, another is asked: it may have
        died of its neighbours' need for memory."""
        why = ""
        with self._lock:
            self._running[future] = child
        for _ in range(2):
            if not self._wanted(future, child):
                break
            try:
                child = child or self._start()
                if not self._wanted(future, child):
                    break
                answer = child.ask(message, time.monotonic() + _HOUR)
                with self._lock:
                    self._running.pop(future, None)
                return child, answer["error"]
            except OSError as error:
                return None, f"no compile worker could be started: {error}"
            except (EndedError, LateError) as error:
                assert child is not None
                self._end(child)
                child, why = None, f"a compile worker died: {error}"
        return child, why

    def _wanted(self, future: Future, child: Child | None) -> bool:
        """Was it not dropped? ``child`` is the worker to end where that comes later."""
        with self._lock:
            if future in self._running:
                self._running[future] = child
            return future in self._running

    def _start(self) -> Child:
        child = Child(_MODULE, self._arch, environment=_environment(self._arch))
        self.children.add(child)
        return child

    def _end(self, child: Child) -> None:
        self.children.discard(child)
        child.end()


def workers() -> int:
    """How many compile workers this process may have: ``CODA_COMPILE_WORKERS``, else its part of
    what all ranks of this host share: as many as the cores that it may use, at most 16."""
    return _workers(os.environ.get("CODA_COMPILE_WORKERS", ""))


@functools.lru_cache(maxsize=8)
def _workers(text: str) -> int:
    default = max(1, min(len(os.sched_getaffinity(0)), _MOST) // ranks()[1])
    if not text:
        return default
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count >= 0:
        return count
    logger.warning(
        "CODA_COMPILE_WORKERS=%r is no number of processes: using %d. Give 0 to compile kernels "
        "in this process, at their first launch, or the most that may run at a time",
        text, default,
    )  # fmt: skip
    return default


def ranks() -> tuple[int, int]:
    """Which process of this job on this host it is, and of how many, as torchrun says; (0, 1) where
    nobody does."""
    rank, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    size = max(1, int(count)) if count.isdecimal() else 1
    return int(rank) % size if rank.isdecimal() else 0, size


def _environment(arch: str) -> dict[str, str]:
    """Of the server: GPU-blind, compiling for ``arch`` from its first import on."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "QUACK_ARCH": arch,
        "CUTE_DSL_ARCH": f"sm_{arch}a",
        "CODA_CACHE_DIR": str(cache_dir()),
        "TORCH_WARM_POOL": "0",  # torch would start compile workers of its own
    }
