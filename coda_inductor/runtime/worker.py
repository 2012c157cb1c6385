# SPDX-License-Identifier: Apache-2.0
"""What a compile worker does. Imports little: it runs in processes that cannot see the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from coda_inductor.cache_dir import write


@dataclass(frozen=True)
class KernelRequest:
    """One kernel to compile.

    ``program`` and ``config`` are texts, as the op takes them. ``a_major``/``b_major``: which
    dimension of A (M x K) and B (K x N) has stride 1. ``swap_lanes`` and ``joined``: how A and B
    are read, as ``mainloop.build`` takes them. ``arch``: compute capability, e.g. "90"; None is
    this machine's.
    """

    program: str
    config: str
    b_major: str = "k"
    a_major: str = "k"
    swap_lanes: bool = False
    joined: str = ""
    arch: str | None = None


def prepare(arch: str) -> None:
    """Import what compiling for ``arch`` needs, before workers fork."""
    from coda_inductor.mainloop import ahead

    ahead.prepare(arch)


def compile_kernel(request: KernelRequest, marker: Path, folder: str | None) -> str | None:
    """Compile one kernel into QuACK's on-disk cache under ``folder``, then write the object file's
    path into ``marker``. Returns an error text or None. One that another process has compiled since
    it was asked for is not compiled again."""
    with contextlib.suppress(OSError):
        if Path(marker.read_text()).exists():
            return None
    try:
        path = _compile(request, folder)
        if not path.exists():
            return f"the kernel was compiled but could not be saved as {path}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # without its marker a kernel is looked up again, no more
        write(marker, str(path))
    return None


def _compile(request: KernelRequest, folder: str | None) -> Path:
    from coda_inductor.mainloop.ahead import compile_to_disk
    from coda_inductor.program import EpilogueProgram
    from coda_inductor.select.config import Config

    how = dataclasses.asdict(request)
    del how["arch"]  # this process has one
    program = EpilogueProgram.from_json(how.pop("program"))
    return compile_to_disk(program, Config.parse(how.pop("config")), folder, **how)
