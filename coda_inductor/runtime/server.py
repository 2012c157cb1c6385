# SPDX-License-Identifier: Apache-2.0
"""The process that compile workers fork from: a child (``processes``) that ``client`` asks.

It imports torch and CuTeDSL once, cannot see the GPU, and receives messages:

- ``{"id": 1, "request": {...}, "folder": ...}`` is compiled by a worker; the answer is
  ``{"id": 1, "error": None}`` (or a text), or ``{"id": 1, "lost": why}`` if the worker died;
- ``{"cancel": 1}`` ends the worker of that request.

It ends with its parent, or after two idle minutes, and its workers end with it. It starts no
thread, because it forks; the threads of the CUDA driver, of NumPy and the thread that watches the
parent hold no locks that a worker needs.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import sys
import warnings
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from coda_inductor.processes.start import Messages
from coda_inductor.runtime.worker import KernelRequest, compile_kernel, prepare

#: Seconds without work after which the server ends: it and its workers hold gigabytes.
IDLE = 120.0
_PR_SET_PDEATHSIG = 1


class _Worker:
    """A forked process that compiles one kernel after another. ``job``: the id of its request."""

    def __init__(self, server: _Server):
        self.connection, remote = Pipe()
        parent = os.getpid()
        self.job: int | None = None
        self.pid = os.fork()  # OSError: a limit on processes
        if self.pid == 0:
            self.connection.close()
            _work(server, parent, remote)
        remote.close()

    def fileno(self) -> int:
        return self.connection.fileno()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # and the compilers that it has started
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # if it is not yet the leader of its group

    def ended(self) -> str:
        """Reap the worker's process. Returns how it ended."""
        self.kill()
        self.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _work(server: _Server, parent: int, requests: Connection) -> NoReturn:
    """A worker's loop. It dies with the server, also while a compiler holds the interpreter."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            server.close()
            while True:
                job = requests.recv()
                request = KernelRequest(**job["request"])
                requests.send(compile_kernel(request, job["folder"]))
    except EOFError:
        code = 0
    finally:
        os._exit(code)


class _Server:
    """Distributes the requests of the parent, read from ``requests``, to ``limit`` workers."""

    def __init__(self, limit: int, requests: Messages):
        self.limit, self.requests = limit, requests
        self.waiting: collections.deque[dict[str, Any]] = collections.deque()
        self.workers: list[_Worker] = []

    def run(self) -> None:
        """Serve until the parent is gone, or until :data:`IDLE` seconds pass without a request."""
        sources: list[Any] = [self.requests]
        ready: Any
        try:
            while (messages := wait(sources, IDLE)) or any(w.job is not None for w in self.workers):
                for ready in messages:
                    if ready is self.requests:
                        while ready.poll():  # read all, so that no cancelled request is started
                            self._accept(ready.recv())
                    elif ready in self.workers:  # not cancelled in the meantime
                        self._answer(ready)
                self._hand_out()
                sources = [self.requests, *self.workers]
        except (EOFError, OSError):
            pass  # the parent is gone
        finally:
            for worker in self.workers:
                worker.kill()

    def close(self) -> None:
        """In a worker: close its copies of the server's connections."""
        for connection in (self.requests, *(worker.connection for worker in self.workers)):
            connection.close()

    def _accept(self, message: dict[str, Any]) -> None:
        if "cancel" not in message:
            self.waiting.append(message)
            return
        job = message["cancel"]
        self.waiting = collections.deque(m for m in self.waiting if m["id"] != job)
        for worker in [w for w in self.workers if w.job == job]:
            self._remove(worker)

    def _remove(self, worker: _Worker) -> str:
        self.workers.remove(worker)
        return worker.ended()

    def _answer(self, worker: _Worker) -> None:
        try:
            answer = {"error": worker.connection.recv()}
        except (EOFError, OSError):
            answer = {"lost": f"a compile worker died: {self._remove(worker)}"}
        if worker.job is not None:
            self.requests.send({"id": worker.job, **answer})
        worker.job = None

    def _start(self) -> _Worker | None:
        """A new worker; None if there are enough. Raises OSError if none can be started."""
        if len(self.workers) >= self.limit:
            return None
        worker = _Worker(self)
        self.workers.append(worker)
        return worker

    def _hand_out(self) -> None:
        while self.waiting:
            worker = next((w for w in self.workers if w.job is None), None)
            try:
                worker = worker or self._start()
            except OSError as error:
                if self.workers:
                    return  # the existing ones suffice
                why = f"no compile worker could be started: {error}"
                self.requests.send({"id": self.waiting.popleft()["id"], "error": why})
                continue
            if worker is None:
                return
            message = self.waiting.popleft()
            worker.job = message["id"]
            with contextlib.suppress(OSError):  # it died: its end is about to be read
                worker.connection.send(message)


def main(parent: Messages, limit: str, arch: str) -> None:
    """Serve ``parent``. ``limit``: the number of workers. ``arch``: e.g. 90."""
    # Python 3.12 counts threads of libraries too, and would warn the user at each fork.
    warnings.filterwarnings("ignore", ".*is multi-threaded, use of fork", DeprecationWarning)
    prepare(arch)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(SystemExit):
        _Server(int(limit), parent).run()
