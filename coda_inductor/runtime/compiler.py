# SPDX-License-Identifier: Apache-2.0
"""A process that compiles kernels, a child (``processes``) of ``pool``.

It gets ``{"request": {...}, "folder": ...}`` and answers an error text or null. It imports little.
"""

import os
from dataclasses import dataclass
from typing import Any, NoReturn

from coda_inductor.processes.start import Messages


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


def main(parent: Messages) -> NoReturn:
    """Compile what ``parent`` asks for, until that is gone: an EOFError."""
    prepare()
    while True:
        message = parent.recv()
        parent.send(compile_kernel(KernelRequest(**message["request"]), message["folder"]))


def prepare() -> None:
    """Import everything that compiling needs."""
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
