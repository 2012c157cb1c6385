# SPDX-License-Identifier: Apache-2.0
"""The connection to a compile server: start it, ask it, end it.

The server (``server.py``) is a child (``processes``). torch's pool for Inductor's compilers is not
used, because it cannot end a single job, waits five minutes for its process, and checks only once a
minute whether its parent lives.

Only ``end`` waits for the server, for a second.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import os
import queue
import threading
from typing import Any

from coda_inductor.cache_dir import cache_dir
from coda_inductor.log import logger
from coda_inductor.processes.child import Child

_MODULE = "coda_inductor.runtime.server"
_MOST = 16  # workers of all ranks of a host, unless CODA_COMPILE_WORKERS says more of one


class Lost(str):
    """Why a kernel was not compiled, if a retry may succeed because a worker or the server died."""

    __slots__ = ()


class Server:
    """A running server for kernels of ``arch``, a compute capability such as "90".

    Raises OSError if no process can be started.
    """

    def __init__(self, arch: str):
        limit = str(max(1, workers()))
        self.child = Child(_MODULE, limit, arch, environment=_environment(arch))
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._futures: dict[int, concurrent.futures.Future] = {}
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: It takes no more requests.
        self.ended = False
        #: It has answered a request, so its imports are done.
        self.answered = False
        for target in (self._read, self._write):
            threading.Thread(target=target, name="coda compile server", daemon=True).start()

    def submit(self, job: dict[str, Any]) -> concurrent.futures.Future:
        """Compile ``job``, as ``server`` describes it. The result is an error text or None."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self.ended:
                future.set_result(Lost("the compile server ended"))
                return future
            number = next(self._numbers)
            self._futures[number] = future
        self._outbox.put({"id": number, **job})
        return future

    def drop(self, future: concurrent.futures.Future, why: str) -> None:
        """Stop compiling for ``future``. Its result becomes ``why``, unless it has one."""
        with self._lock:
            number = next((n for n, f in self._futures.items() if f is future), None)
            if number is None:
                return
            del self._futures[number]
        self._outbox.put({"cancel": number})
        future.set_result(why)

    def end(self) -> None:
        """End the server and its workers at once. This takes at most two seconds."""
        with self._lock:
            self.ended = True
        self.child.end()

    def abandon(self) -> None:
        """In a fork of this process: see :meth:`Child.abandon`."""
        self.ended = True
        self.child.abandon()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self.child.connection.send(message)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while message := self.child.connection.recv():
                self.answered = True
                with self._lock:
                    future = self._futures.pop(message["id"], None)
                if future is not None:  # not dropped in the meantime
                    lost = message.get("lost")
                    future.set_result(Lost(lost) if lost else message["error"])
        self._outbox.put(None)
        with self._lock:
            self.ended = True
            futures = list(self._futures.values())
            self._futures.clear()
        status = self.child.ended()
        why: str = Lost("the compile server ended")
        if status.code and status.code > 0:  # it raised: another server would too
            why = f"no compile server: {status}"
        for future in futures:
            future.set_result(why)


def workers() -> int:
    """The number of compile workers that this process may have: ``CODA_COMPILE_WORKERS``, else each
    rank's equal share of the usable cores of this host, at most 16."""
    return _workers(os.environ.get("CODA_COMPILE_WORKERS", ""))


@functools.lru_cache(maxsize=8)
def _workers(text: str) -> int:
    if text.isdecimal():
        return int(text)
    default = max(1, min(len(os.sched_getaffinity(0)), _MOST) // ranks()[1])
    if text:
        logger.warning(
            "CODA_COMPILE_WORKERS=%r is not a number of processes: using %d. Set it to the most "
            "that may run, or to 0 to compile kernels in this process at their first launch",
            text, default,
        )  # fmt: skip
    return default


def ranks() -> tuple[int, int]:
    """(index, count) of this process among its job's on this host, from torchrun; else (0, 1)."""
    rank, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    size = max(1, int(count)) if count.isdecimal() else 1
    return int(rank) % size if rank.isdecimal() else 0, size


def _environment(arch: str) -> dict[str, str]:
    """The server's environment: no GPU is visible, and it compiles for ``arch`` from the start."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "QUACK_ARCH": arch,
        "CUTE_DSL_ARCH": f"sm_{arch}a",
        "CODA_CACHE_DIR": str(cache_dir()),
        "TORCH_WARM_POOL": "0",  # torch would start compile workers of its own
    }
