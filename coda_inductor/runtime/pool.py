# SPDX-License-Identifier: Apache-2.0
"""Compile kernels in parallel, ahead of time, in processes that cannot see the GPU.

A kernel takes 2-4 s of one core, and a model needs a dozen. ``submit`` hands the missing ones to
threads, each of which asks a process of its own (``compiler``), ``wait`` collects the outcome, and
the first launch then loads the object file from QuACK's on-disk cache (a few milliseconds).

No call can hang: a batch has one deadline, at which kernels that were not begun are dropped; a
worker that takes five minutes for one is killed. No process outlives this one, and no call raises:
a kernel that cannot be compiled gets a reason. With ``CODA_COMPILE_WORKERS=0`` the first launch
compiles. In torch's pool for Inductor's compilers, and in a ``ProcessPoolExecutor``, all kernels in
progress fail with a worker that dies.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import os
import threading
import time
from dataclasses import asdict

from coda_inductor.cache_dir import cache_dir
from coda_inductor.log import say_once
from coda_inductor.mainloop.availability import library_stack
from coda_inductor.mainloop.environment import label
from coda_inductor.processes.child import Child
from coda_inductor.runtime.compiler import KernelRequest, machine_arch, parts

_MODULE = "coda_inductor.runtime.compiler"
_MOST = 16  # workers of all ranks of a host, unless CODA_COMPILE_WORKERS says more of one
_LIMIT = 300.0  # seconds for a kernel, and for a batch of them
_LATE = "compiling its kernel took too long"
_IDLE = 120.0  # seconds without work after which a worker ends: it holds 0.4 GB

_Future = concurrent.futures.Future["str | None"]  # an error text, or None

_lock = threading.Condition()  # of all below
_threads: set[threading.Thread] = set()
_free: set[threading.Thread] = set()  # those that wait for work
_workers: set["_Worker"] = set()
_futures: dict[KernelRequest, _Future] = {}
_waiting: collections.deque[tuple[KernelRequest, _Future]] = collections.deque()


class _Worker(Child):
    """A process that compiles for ``arch``, e.g. "90". Raises OSError if none can be started."""

    def __init__(self, arch: str):
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "QUACK_ARCH": arch,
            "CUTE_DSL_ARCH": f"sm_{arch}a",
            "CODA_CACHE_DIR": str(cache_dir()),
            "TORCH_WARM_POOL": "0",  # torch would start compile workers of its own
        }
        super().__init__(_MODULE, environment=environment)
        self.arch = arch


def submit(requests: list[KernelRequest]) -> None:
    """Start to compile ``requests``, except kernels that are compiled or in progress."""
    if library_stack() is None and workers() > 0:
        with contextlib.suppress(Exception):  # ``wait`` returns the reason
            _submit(requests)


def wait(requests: list[KernelRequest], timeout: float = _LIMIT) -> dict[KernelRequest, str | None]:
    """Submit ``requests`` and wait at most ``timeout`` seconds for all of them together. Returns,
    for each request, None if its kernel is in the on-disk cache now, else the reason."""
    if (why := library_stack()) is not None or workers() == 0:
        return dict.fromkeys(requests, None if why is None else why.text)
    try:
        futures = _submit(requests)
    except Exception as error:
        return dict.fromkeys(requests, f"no compile worker: {error!r}")
    concurrent.futures.wait(futures.values(), timeout)
    drop(requests)
    ended = {r: f for r, f in futures.items() if f.done() and not f.cancelled()}
    errors = {r: ended[r].result() if r in ended else _LATE for r in futures}
    return {r: errors.get(r) for r in requests}


def drop(requests: list[KernelRequest]) -> None:
    """Compile none of ``requests`` that was not begun, and forget the results of others."""
    with _lock:
        for request in requests:
            if request in _futures and (_futures[request].cancel() or _futures[request].done()):
                del _futures[request]


def warm_up() -> None:
    """Start the workers: their imports take seconds, in which the caller still analyzes its graph.
    Returns at once. Does nothing without the libraries, or if kernels were compiled before,
    because new ones are then seldom needed."""
    some = (cache_dir() / "kernels" / label()).glob("*/*.o")
    if library_stack() is None and not any(some):
        with contextlib.suppress(Exception), _lock:  # ``wait`` returns the reason
            while len(_threads) < workers():
                _start(_new_worker())


def shutdown() -> None:
    """End the workers now; a later ``submit`` starts new ones."""
    with _lock:
        for _, future in _waiting:
            future.cancel()
        ended = [*_workers]
        for each in (_threads, _free, _workers, _futures, _waiting):
            each.clear()
        _lock.notify_all()
    for worker in ended:
        worker.end()


def is_ready(request: KernelRequest) -> bool:
    """Is the kernel of ``request`` in the on-disk cache?"""
    from coda_inductor.mainloop.ahead import kernel_file

    return kernel_file(*parts(request)).exists()


def workers() -> int:
    """The number of compile workers that this process may have: ``CODA_COMPILE_WORKERS``, else each
    rank's equal share of the usable cores of this host, at most 16."""
    text = os.environ.get("CODA_COMPILE_WORKERS", "")
    if text.isdecimal():
        return int(text)
    default = max(1, min(len(os.sched_getaffinity(0)), _MOST) // _ranks()[1])
    if text:
        say_once(
            f"CODA_COMPILE_WORKERS={text!r} is not a number of processes: using {default}. Set it "
            "to the most that may run, or to 0 to compile kernels here at their first launch"
        )
    return default


def _ranks() -> tuple[int, int]:
    """(index, count) of this process among its job's on this host, from torchrun; else (0, 1)."""
    rank, count = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    size = max(1, int(count)) if count.isdecimal() else 1
    return int(rank) % size if rank.isdecimal() else 0, size


def _submit(requests: list[KernelRequest]) -> dict[KernelRequest, _Future]:
    """Start to compile what is missing of ``requests``; returns the futures of all that is. All
    ranks of a host request the same kernels: each starts at another one, and later finds the
    others' results on disk."""
    with _lock:
        missing = [r for r in dict.fromkeys(requests) if r in _futures or not is_ready(r)]
        rank, count = _ranks()
        first = len(missing) * rank // count
        for request in [*missing[first:], *missing[:first]]:
            if request not in _futures:
                _futures[request] = concurrent.futures.Future()
                _waiting.append((request, _futures[request]))
                if len(_free) < len(_waiting) and len(_threads) < workers():
                    _start()
        _lock.notify_all()
        return {r: _futures[r] for r in missing}


def _start(worker: _Worker | None = None) -> None:
    """Start a thread, with ``worker`` as its worker. The caller holds the lock."""
    thread = threading.Thread(target=_serve, args=(worker,), daemon=True)
    _threads.add(thread)
    thread.start()


def _serve(worker: _Worker | None) -> None:
    """A thread: let one worker compile kernels until none waits for long, or the pool is shut."""
    me = threading.current_thread()
    while True:
        with _lock:
            _free.add(me)
            _lock.wait_for(lambda: _waiting or me not in _threads, _IDLE)
            _free.discard(me)
            if not _waiting or me not in _threads:
                _threads.discard(me)  # with the lock: what is submitted from here on gets another
                break
            request, future = _waiting.popleft()
        if future.set_running_or_notify_cancel():
            error, worker = _compile(request, worker)
            future.set_result(error)
    _end(worker)


def _compile(request: KernelRequest, worker: _Worker | None) -> tuple[str | None, _Worker | None]:
    words = _LATE
    for _ in range(2):  # a worker may have died because others needed its memory
        try:
            from coda_inductor.mainloop.ahead import cache_folder

            message = {"request": asdict(request), "folder": cache_folder()}
            if worker is not None and worker.arch != machine_arch():
                _end(worker)
                worker = None
            with _lock:
                if threading.current_thread() not in _threads:
                    break  # it was shut down
                worker = worker or _new_worker()
            return worker.ask(message, time.monotonic() + _LIMIT), worker
        except (ChildProcessError, TimeoutError) as ended:
            _end(worker)
            worker = None
            if isinstance(ended, TimeoutError):
                break
            words = f"a compile worker died: {ended}"
        except Exception as error:
            return f"no compile worker: {error}", worker
    return words, worker


def _new_worker() -> _Worker:
    """A new worker. The caller holds the lock."""
    _workers.add(worker := _Worker(machine_arch()))
    return worker


def _end(worker: _Worker | None) -> None:
    if worker is not None:
        with _lock:
            _workers.discard(worker)
        worker.end()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 (a thread may have held it)
    _lock = threading.Condition()
    for each in (_threads, _free, _workers, _futures, _waiting):
        each.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)
