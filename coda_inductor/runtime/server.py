# SPDX-License-Identifier: Apache-2.0
"""The process that compile workers fork from. Run by path, by ``client``: no module of ours yet.

It imports torch and CuTeDSL once, cannot see the GPU, and is asked in JSON, a line each:

- ``{"id": 1, "request": {...}, "marker": ..., "folder": ...}`` is compiled by a worker; the answer
  is ``{"id": 1, "error": null}``, or why not, or ``{"id": 1, "lost": why}`` if the worker died;
- ``{"cancel": 1}`` ends the worker that has it.

It ends, and its workers with it, when its parent does, however that ends, and after two idle
minutes. It has one thread whenever it forks.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib.util
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

#: Seconds without work after which the server ends: it and its workers hold gigabytes.
IDLE = 120.0
_LOOK = 0.5  # seconds between two looks for the parent
_PR_SET_PDEATHSIG = 1


class Lines:
    """JSON values, a line each, that arrive on the file descriptor ``fd``."""

    def __init__(self, fd: int):
        self.fd, self._rest = fd, b""

    def read(self) -> list[Any] | None:
        """Wait for data; returns the values that are complete, None at the end of the file."""
        try:
            data = os.read(self.fd, 1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def __iter__(self) -> Iterator[Any]:
        while (values := self.read()) is not None:
            yield from values


def send(fd: int, value: Any) -> None:
    """Write ``value`` as a line of JSON."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


class _Worker:
    """A forked process that compiles one kernel after another. ``job``: the id of its own."""

    def __init__(self, server: _Server):
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        self.job: int | None = None
        self.pid = os.fork()  # OSError: a limit on processes
        if self.pid == 0:
            ours.close()
            _work(server, parent, theirs)
        theirs.close()
        self.socket = ours
        self.answers = Lines(ours.fileno())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # and the compilers that it has started
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # if it is not yet the leader of its group

    def ended(self) -> str:
        """Reap it; returns how it ended."""
        self.kill()
        self.socket.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return f"signal {-code}" if code < 0 else f"exit status {code}"


def _work(server: _Server, parent: int, requests: socket.socket) -> NoReturn:
    """A worker's life. It dies with the server, also while a compiler holds the interpreter."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            server.close()
            from coda_inductor.runtime.worker import KernelRequest, compile_kernel

            for job in Lines(requests.fileno()):
                request = KernelRequest(**job["request"])
                error = compile_kernel(request, Path(job["marker"]), job["folder"])
                send(requests.fileno(), error)
            code = 0
    finally:
        os._exit(code)


class _Server:
    """Hands the requests that arrive on ``requests`` to at most ``limit`` workers."""

    def __init__(self, parent: int, limit: int, requests: Lines, answers: int):
        self.parent, self.limit, self.requests, self.answers = parent, limit, requests, answers
        self.waiting: collections.deque[dict[str, Any]] = collections.deque()
        self.workers: list[_Worker] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(requests.fd, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the parent is gone, or nothing has happened for :data:`IDLE` seconds."""
        try:
            busy = time.monotonic()
            while os.getppid() == self.parent and time.monotonic() - busy < IDLE:
                for key, _ in self.selector.select(_LOOK):
                    if key.data is not None:
                        self._answer(key.data)
                    elif not self._accept():
                        return
                self._hand_out()
                if any(worker.job is not None for worker in self.workers):
                    busy = time.monotonic()
        except BrokenPipeError:
            pass  # nobody reads the answers
        finally:
            for worker in self.workers:
                worker.kill()

    def close(self) -> None:
        """In a worker: leave the server's connections to the server."""
        self.selector.close()
        os.close(self.requests.fd)
        os.close(self.answers)
        for worker in self.workers:
            worker.socket.close()

    def _accept(self) -> bool:
        """Take what the parent sends; False if it has closed the connection."""
        messages = self.requests.read()
        for message in messages or ():
            if "cancel" in message:
                self._cancel(message["cancel"])
            else:
                self.waiting.append(message)
        return messages is not None

    def _cancel(self, job: int) -> None:
        self.waiting = collections.deque(m for m in self.waiting if m["id"] != job)
        for worker in self.workers:
            if worker.job == job:
                worker.job = None
                self._remove(worker)
                return

    def _remove(self, worker: _Worker) -> str:
        self.selector.unregister(worker.socket)
        self.workers.remove(worker)
        return worker.ended()

    def _answer(self, worker: _Worker) -> None:
        if worker not in self.workers:
            return  # cancelled since
        errors = worker.answers.read()
        for error in errors or ():
            send(self.answers, {"id": worker.job, "error": error})
            worker.job = None
        if errors is None:
            how = self._remove(worker)
            if worker.job is not None:
                send(self.answers, {"id": worker.job, "lost": f"a compile worker died: {how}"})

    def _start(self) -> _Worker | None:
        """A new worker, unless there are enough. Raises OSError where there can be none."""
        if len(self.workers) >= self.limit:
            return None
        worker = _Worker(self)
        self.selector.register(worker.socket, selectors.EVENT_READ, worker)
        self.workers.append(worker)
        return worker

    def _hand_out(self) -> None:
        while self.waiting:
            worker = next((w for w in self.workers if w.job is None), None)
            try:
                worker = worker or self._start()
            except OSError as error:
                if self.workers:
                    return  # those that there are will do
                why = f"no compile worker could be started: {error}"
                send(self.answers, {"id": self.waiting.popleft()["id"], "error": why})
                continue
            if worker is None:
                return
            message = self.waiting.popleft()
            worker.job = message["id"]
            with contextlib.suppress(OSError):  # it died: its end is about to be read
                send(worker.socket.fileno(), message)


@contextlib.contextmanager
def _ends_with(parent: int) -> Iterator[None]:
    """Imports take seconds, in which a parent may end."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK):
            if os.getppid() != parent:
                os._exit(1)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _load(arch: str, path: list[str]) -> None:
    """Import all that workers need. This very package, and nothing from the current folder."""
    sys.path[:] = path
    package = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(
        package.name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)
    from coda_inductor.runtime.worker import prepare

    prepare(arch)


def _open_stderr() -> None:
    try:
        os.fstat(2)
    except OSError:  # the parent has closed its own, as daemons do; the next file would be it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def main(parent: int, limit: int, arch: str) -> None:
    """``parent``: its process id. ``limit``: of workers. ``arch``: compute capability, e.g. 90.

    The first line that arrives is the parent's ``sys.path``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    _open_stderr()
    requests, answers = Lines(os.dup(0)), os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with _ends_with(parent):
        path = b""
        while not path.endswith(b"\n"):
            if not (byte := os.read(requests.fd, 1)):
                return
            path += byte
        try:
            _load(arch, json.loads(path))
        except BaseException as error:
            send(answers, {"failed": f"{type(error).__name__}: {error}"})
            raise
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(SystemExit):
        _Server(parent, limit, requests, answers).run()
    os._exit(0)  # taking the interpreter down in order takes a second


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
