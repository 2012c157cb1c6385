# SPDX-License-Identifier: Apache-2.0
"""Compile kernels in parallel, ahead of time, in processes that cannot see the GPU.

A kernel takes 2-4 s of one core, and a model needs a dozen. ``submit`` hands the missing ones to a
compile server (``client``, ``server``), ``wait`` collects the outcome, and the first launch then
loads the object file that a worker left in QuACK's on-disk cache (a few milliseconds). Kernels that
are on disk are not submitted.

No call can hang: every wait has a deadline, after which the work is dropped and its worker killed.
No worker outlives this process, and no call raises: a kernel that cannot be compiled gets a reason.
Without workers (``CODA_COMPILE_WORKERS=0``, or in a daemonic process, which may have no children),
the first launch compiles.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import multiprocessing
import os
import threading
import time
from pathlib import Path

from coda_inductor.cache_dir import cache_dir
from coda_inductor.log import logger
from coda_inductor.mainloop.availability import library_stack
from coda_inductor.mainloop.environment import label
from coda_inductor.runtime.client import Lost, Server, ranks, workers
from coda_inductor.runtime.worker import KernelRequest, machine_arch, parts

_lock = threading.Lock()
_servers: dict[str, Server] = {}  # by architecture
_jobs: dict[KernelRequest, tuple[Server, concurrent.futures.Future]] = {}


def submit(requests: list[KernelRequest]) -> int:
    """Start to compile ``requests``, except kernels that are compiled or in progress. Returns the
    number of started ones. Without the libraries this does nothing: ``wait`` returns the reason."""
    if library_stack() is not None or _alone():
        return 0
    with _lock:
        missing = [r for r in dict.fromkeys(requests) if r not in _jobs and not is_ready(r)]
        for request in _stagger(missing):
            _start(request)
    return len(missing)


def wait(requests: list[KernelRequest], timeout: float = 300.0) -> dict[KernelRequest, str | None]:
    """Submit ``requests`` and wait at most ``timeout`` seconds for all of them together.

    Returns, for each request, None if its kernel is in the on-disk cache now, else the reason.
    """
    if (why := library_stack()) is not None or _alone():
        return dict.fromkeys(requests, None if why is None else why.text)
    deadline = time.monotonic() + timeout
    outcome: dict[KernelRequest, str | None] = {}
    try:
        submit(requests)
        # The last ones first, so that no dropped request is started.
        outcome |= {r: _outcome(r, deadline) for r in reversed(requests)}
        lost = [r for r, error in outcome.items() if isinstance(error, Lost)]
        submit(lost)  # once more: a worker may have died because others needed its memory
        outcome |= {r: _outcome(r, deadline) for r in lost}
    except Exception as error:
        logger.debug("the compile pool failed", exc_info=True)
        outcome = {**dict.fromkeys(requests, f"no compile pool: {error!r}"), **outcome}
    return {r: outcome[r] for r in requests}


def drop(requests: list[KernelRequest]) -> None:
    """Stop compiling the ``requests`` that are still in progress."""
    for request in requests:
        if request in _jobs:
            _outcome(request, 0.0)


def serving() -> bool:
    """Has a running server compiled something? A new server takes seconds to import."""
    return any(server.answered and not server.ended for server in list(_servers.values()))


def warm_up() -> None:
    """Start the server process that workers fork from: its imports take seconds, in which the
    caller still analyzes its graph. Returns at once. Does nothing without the libraries, or if
    kernels were compiled before, because new ones are then seldom needed."""
    some = (cache_dir() / "kernels" / label()).glob("*/*.o")
    if library_stack() is not None or _alone() or any(some):
        return
    try:
        with _lock:
            _server()
    except Exception:  # ``wait`` will report it, if a kernel is needed
        logger.debug("the compile pool did not start", exc_info=True)


def shutdown() -> None:
    """End the server and its workers now; a later ``submit`` starts new ones."""
    with _lock:
        servers = list(_servers.values())
        _servers.clear()
        _jobs.clear()
    for server in servers:
        server.end()


def is_ready(request: KernelRequest) -> bool:
    """Is the kernel of ``request`` in the on-disk cache?"""
    return _file(request).exists()


def _outcome(request: KernelRequest, deadline: float) -> str | None:
    with _lock:
        job = _jobs.get(request)
    if job is None:
        return None if is_ready(request) else Lost("the compile pool was shut down")
    server, future = job
    concurrent.futures.wait([future], max(0.0, deadline - time.monotonic()))
    server.drop(future, "compiling its kernel took too long")
    error = future.result()
    with _lock:
        if _jobs.get(request) == job:
            del _jobs[request]
    return error


def _stagger(requests: list[KernelRequest]) -> list[KernelRequest]:
    """``requests`` in another order for each rank. All ranks of a host request the same kernels:
    each starts at another one, and later finds the others' results on disk
    (``worker.compile_kernel``)."""
    rank, count = ranks()
    first = len(requests) * rank // count
    return [*requests[first:], *requests[:first]]


def _start(request: KernelRequest) -> None:
    from coda_inductor.mainloop.ahead import cache_folder

    job = {"request": dataclasses.asdict(request), "folder": cache_folder()}
    server = _server()
    _jobs[request] = server, server.submit(job)


def _server() -> Server:
    """A running server, started if needed. An idle server ends by itself."""
    server = _servers.get(arch := machine_arch())
    if server is None or server.ended:
        server = _servers[arch] = Server(arch)
    return server


def _alone() -> bool:
    """Must this process start no other one? Daemons (of a ``multiprocessing.Pool``) may not."""
    return multiprocessing.current_process().daemon or workers() == 0


def _after_fork() -> None:
    """In a forked child: leave the server to the parent."""
    global _lock  # noqa: PLW0603 (another thread of the parent may have held it at the fork)
    _lock = threading.Lock()
    for server in _servers.values():
        server.abandon()
    _servers.clear()
    _jobs.clear()


def _file(request: KernelRequest) -> Path:
    from coda_inductor.mainloop.ahead import kernel_file

    return kernel_file(*parts(request))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)
