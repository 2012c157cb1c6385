"""Compile kernels in parallel, ahead of time, in processes that cannot see the GPU.

A kernel takes 2-4 s of one core, and a model needs a dozen. ``submit`` hands the missing ones to a
pool of workers, ``wait`` collects the outcome, and the first launch then loads the object file that
a worker left in QuACK's on-disk cache (a few milliseconds). Workers fork from one server process
that has imported torch and CuTeDSL already (QuACK's own preload). Kernels that are on disk are not
submitted: each has a small marker beside it, written by the worker that compiled it.

Nothing here can hang: every wait has a deadline, and workers are daemons of this process. Nothing
raises either: what cannot be compiled has a reason. In a daemonic process, which may have no
children, the first launch compiles.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

from coda_inductor.log import logger
from coda_inductor.runtime.support import library_stack
from coda_inductor.runtime.worker import KernelRequest, begin, compile_kernel

_IDLE_SECONDS = 120.0


class _Lost(str):
    """Why a kernel was not compiled that may yet be: a worker that died takes its pool with it."""


_lock = threading.Lock()
_executors: dict[str | None, concurrent.futures.ProcessPoolExecutor] = {}  # by architecture
_futures: dict[KernelRequest, concurrent.futures.Future] = {}
_idle_timers: list[threading.Timer] = []


def submit(requests: list[KernelRequest]) -> int:
    """Start compiling those of ``requests`` that are neither compiled nor under way; returns how
    many were started. Without the libraries this does nothing: ``wait`` says why."""
    if library_stack() is not None or _childless():
        return 0
    requests = [_resolved(r) for r in requests]
    with _lock:
        missing = [r for r in dict.fromkeys(requests) if r not in _futures and not is_ready(r)]
        if missing:
            _start(missing)
    return len(missing)


def wait(requests: list[KernelRequest], timeout: float = 300.0) -> dict[KernelRequest, str | None]:
    """Submit ``requests`` and wait at most ``timeout`` seconds for all of them together.

    Returns, for each, None if its kernel is in the on-disk cache now, else why it is not.
    """
    if library_stack() is not None or _childless():
        return dict.fromkeys(requests, library_stack())
    deadline = time.monotonic() + timeout
    outcome: dict[KernelRequest, str | None] = {}
    try:
        submit(requests)
        outcome |= {r: _outcome(_resolved(r), deadline) for r in requests}
        lost = [r for r, error in outcome.items() if isinstance(error, _Lost)]
        submit(lost)  # once more: it may have died of another's kernel, or of an interrupt
        outcome |= {r: _outcome(_resolved(r), deadline) for r in lost}
    except Exception as error:
        logger.debug("the compile pool failed", exc_info=True)
        outcome |= {r: f"no compile pool: {error!r}" for r in requests if r not in outcome}
    _restart_idle_timer()
    return outcome


def warm_up() -> None:
    """Start the server process that workers fork from: it imports for seconds, while the caller
    still analyses its graph. Does nothing without the libraries."""
    if library_stack() is not None or _childless():
        return
    from quack.cache.async_compile import _neutral_main

    try:
        with _lock, _neutral_main():
            arch = _machine_arch()
            if arch not in _executors:
                _executors[arch] = _make_executor(arch)
                _executors[arch].submit(os.getpid)
    except Exception:  # ``wait`` will say so, if anything is to be compiled at all
        logger.debug("the compile pool did not start", exc_info=True)
    _restart_idle_timer()


def shutdown() -> None:
    """End the workers now; a later ``submit`` starts new ones."""
    with _lock:
        executors = list(_executors.values())
        _executors.clear()
        _futures.clear()
        _cancel_idle_timer()
    for executor in executors:
        executor.shutdown(wait=False, cancel_futures=True)


def is_ready(request: KernelRequest) -> bool:
    """Is the kernel of ``request`` in the on-disk cache?"""
    marker = _marker(_resolved(request))
    try:
        return Path(marker.read_text()).exists()
    except OSError:
        return False


def _outcome(request: KernelRequest, deadline: float) -> str | None:
    with _lock:
        future = _futures.get(request)
    if future is None:
        return None if is_ready(request) else _Lost("the compile pool was shut down")
    try:
        error = future.result(max(0.0, deadline - time.monotonic()))
    except concurrent.futures.TimeoutError:
        return "compiling its kernel took too long"
    except (concurrent.futures.CancelledError, concurrent.futures.BrokenExecutor) as exception:
        shutdown()  # a broken executor takes no more work
        return _Lost(f"a compile worker died: {exception!r}")
    except Exception as exception:
        error = f"its compile worker failed: {exception!r}"
    with _lock:
        _futures.pop(request, None)
    return error


def _start(requests: list[KernelRequest]) -> None:
    import quack.cache
    from quack.cache.async_compile import _neutral_main

    with _neutral_main():  # workers must not run the user's script
        for request in requests:
            if request.arch not in _executors:
                _executors[request.arch] = _make_executor(request.arch)
            _futures[request] = _executors[request.arch].submit(
                compile_kernel, request, _marker(request), quack.cache.CACHE_DIR
            )


def _make_executor(arch: str | None) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quack.cache._pool_preload", "coda_inductor.kernels.build"])
    return concurrent.futures.ProcessPoolExecutor(
        max_workers=min(os.cpu_count() or 1, 16),
        mp_context=context,
        initializer=begin,
        initargs=(arch, f"sm_{arch}a"),
    )


def _childless() -> bool:
    """Daemonic processes (of a ``multiprocessing.Pool``, say) may not start any."""
    return multiprocessing.current_process().daemon


def _marker(request: KernelRequest) -> Path:
    return _marker_folder() / _request_hash(request)


@functools.lru_cache(maxsize=4096)
def _request_hash(request: KernelRequest) -> str:
    from coda_inductor.program import EpilogueProgram

    fields = dataclasses.asdict(request)
    fields["program"] = EpilogueProgram.from_json(request.program).key
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1)
def _marker_folder() -> Path:
    """Markers hold for one version of everything that turns a program into code."""
    from quack.cache.jit import _compute_source_fingerprint, get_cache_path

    from coda_inductor.kernels.mod import codegen_hash

    return get_cache_path() / _compute_source_fingerprint() / f"coda_{codegen_hash()}"


@functools.lru_cache(maxsize=1)
def _machine_arch() -> str:
    from quack.cute_dsl_utils import get_device_capacity

    return "".join(map(str, get_device_capacity()))


def _resolved(request: KernelRequest) -> KernelRequest:
    if request.arch is not None:
        return request
    return dataclasses.replace(request, arch=_machine_arch())


def _restart_idle_timer() -> None:
    """Workers hold a few hundred megabytes each: let them go once nothing is to be compiled."""
    with _lock:
        _cancel_idle_timer()
        if _executors and not _futures:
            timer = threading.Timer(_IDLE_SECONDS, shutdown)
            timer.daemon = True
            timer.start()
            _idle_timers.append(timer)


def _cancel_idle_timer() -> None:
    while _idle_timers:
        _idle_timers.pop().cancel()


atexit.register(shutdown)
