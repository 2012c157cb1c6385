# SPDX-License-Identifier: Apache-2.0
"""What a compile worker does. Imports little: it runs in processes that cannot see the GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from coda_inductor.cache_dir import write


@dataclass(frozen=True)
class KernelRequest:
    """One kernel to compile.

    ``program`` and ``config`` are texts, as the op takes them. ``a_major``/``b_major``: which
    dimension of A (M x K) and B (K x N) has stride 1. ``swap_lanes`` and ``joined``: how A and B
    are read, as ``kernels.build`` takes them. ``arch``: compute capability, e.g. "90"; None is this
    machine's.
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
    from quack.cache.async_compile import _pool_initializer

    import coda_inductor.mainloop.build  # noqa: F401

    _pool_initializer(arch, f"sm_{arch}a")


def compile_kernel(request: KernelRequest, marker: Path, folder: str | None) -> str | None:
    """Compile one kernel into QuACK's on-disk cache under ``folder``, then write the object file's
    path into ``marker``. Returns an error text or None."""
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
    import quack.cache
    import quack.cache.jit
    import quack.gemm_runtime.host

    from coda_inductor.mainloop.build import build
    from coda_inductor.mainloop.mod import load
    from coda_inductor.program import EpilogueProgram
    from coda_inductor.select.config import Config

    # The server may have started under another environment.
    quack.cache.CACHE_DIR = folder
    # Only a launch needs this number, and only a GPU knows it.
    quack.gemm_runtime.host.get_max_active_clusters = lambda *_, **__: 0
    program = EpilogueProgram.from_json(request.program)
    # A kernel that this worker has in memory would be neither hashed nor saved again.
    load(program, request.swap_lanes, request.joined)._plan_cache.clear()
    quack.gemm_runtime.host._compile_gemm_epi.cache_clear()
    names: list[str] = []
    key_to_hash = quack.cache.jit._key_to_hash

    def record(key: tuple) -> str:
        names.append(key_to_hash(key))
        return names[-1]

    quack.cache.jit._key_to_hash = record
    try:
        build(
            program,
            Config.parse(request.config),
            a_major=request.a_major,
            b_major=request.b_major,
            swap_lanes=request.swap_lanes,
            joined=request.joined,
        )
    finally:
        quack.cache.jit._key_to_hash = key_to_hash
    cache = quack.cache.jit
    return cache.get_cache_path() / cache._compute_source_fingerprint() / f"{names[-1]}.o"
