# SPDX-License-Identifier: Apache-2.0
"""The compile server, a child (``processes``) of ``pool``, and the workers that fork from it.

The server imports torch and CuTeDSL once, and forks a worker for each connection that it receives.
A worker receives ``{"request": {...}, "folder": ..., "seconds": 300}`` and answers an error text or
null; it is killed if that takes longer.

The server starts no thread, because it forks; the threads of the CUDA driver, of NumPy and the
thread that watches the parent hold no locks that a worker needs. This module imports little.
"""

import ctypes
import os
import signal
import warnings
from dataclasses import dataclass
from multiprocessing.reduction import recv_handle
from typing import Any, NoReturn

from coda_inductor.processes.start import Messages

_IDLE = 120.0  # seconds without work after which a worker ends: it holds 0.3 GB
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class KernelRequest:
    """One kernel to compile. ``program`` and ``config`` are texts, as the op takes them.
    ``a_major``/``b_major``: which dimension of A (M x K) and B (K x N) has stride 1. ``variant``: a
    variant of their reading (``mainloop.readings``). Kernels without a program use other texts
    (``runtime.on_cuda.requests``)."""

    program: str
    config: str
    a_major: str = "k"
    b_major: str = "k"
    variant: str = ""


def main(parent: Messages) -> None:
    """Fork a worker for each connection from ``parent``, until that is gone: an EOFError."""
    # Python 3.12 counts threads of libraries too, and would warn at each fork.
    warnings.filterwarnings("ignore", ".*is multi-threaded, use of fork", DeprecationWarning)
    prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers need no waiting for
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    pid = os.getpid()
    while True:
        requests = Messages(recv_handle(parent))
        try:
            if os.fork() == 0:
                parent.close()
                _work(requests, pid)
        except OSError as error:  # a limit on processes
            requests.send(f"no compile worker could be started: {error}")
        requests.close()


def _work(requests: Messages, server: int) -> NoReturn:
    """Compile kernels. The worker dies with the server, also in the middle of one."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        while os.getppid() == server and requests.poll(_IDLE):
            message = requests.recv()
            signal.setitimer(signal.ITIMER_REAL, message["seconds"])
            error = compile_kernel(KernelRequest(**message["request"]), message["folder"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            requests.send(error)
    finally:
        os._exit(0)


def prepare() -> None:
    """Import everything that compiling needs, before workers fork."""
    from coda_inductor.compat import without_dynamo

    without_dynamo()
    from coda_inductor.mainloop import ahead

    ahead.prepare(machine_arch())


def compile_kernel(request: KernelRequest, folder: str | None) -> str | None:
    """Compile one kernel into QuACK's on-disk cache under ``folder``, unless another process has
    done so since the request. Returns an error text or None."""
    from coda_inductor.mainloop.ahead import compile_to_disk

    try:
        path = compile_to_disk(folder, *parts(request))
        if not path.exists():
            return f"the kernel was compiled but could not be saved as {path}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def parts(request: KernelRequest) -> tuple[Any, ...]:
    """The arguments of ``mainloop.mod.kernel_name`` for ``request``: program and config (or their
    texts, without a program), then the others."""
    rest = request.a_major, request.b_major, request.variant, machine_arch()
    if not request.program.startswith("{"):
        return request.program, request.config, *rest
    from coda_inductor.program import EpilogueProgram
    from coda_inductor.select.config import Config

    return EpilogueProgram.from_json(request.program), Config.parse(request.config), *rest


def machine_arch() -> str:
    """The compute capability, e.g. "90", as QuACK determines it: ``QUACK_ARCH``, or the GPU's.
    QuACK itself is not imported, because that takes seconds."""
    if text := os.environ.get("QUACK_ARCH"):
        return "".join(c for c in text if c.isdecimal())
    import torch

    return "".join(map(str, torch.cuda.get_device_capability()))
