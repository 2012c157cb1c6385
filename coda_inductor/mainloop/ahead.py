# SPDX-License-Identifier: Apache-2.0
"""Compile kernels into QuACK's on-disk cache, in processes that cannot see the GPU."""

from pathlib import Path
from typing import Any

import quack.cache.jit
import quack.gemm_runtime.host
from quack.cache.async_compile import _pool_initializer

from coda_inductor.mainloop import store
from coda_inductor.mainloop.build import build
from coda_inductor.mainloop.mod import kernel_name, load
from coda_inductor.program import EpilogueProgram


def prepare(arch: str) -> None:
    """Set the architecture that this process compiles for, e.g. "90"."""
    _pool_initializer(arch, f"sm_{arch}a")


def cache_folder() -> str | None:
    """The folder where QuACK keeps kernels; None if it keeps none."""
    return quack.cache.CACHE_DIR


def kernel_file(program: EpilogueProgram | str, config: Any, *how: str) -> Path:
    """The path of a kernel's file; ``how`` is passed to ``mod.kernel_name``."""
    cache = quack.cache.jit
    folder = Path(cache.get_cache_path()) / cache._compute_source_fingerprint()
    file = folder / f"{kernel_name(program, config, *how)}.o"
    return file if file.exists() else store.read_only(file) or file


def compile_to_disk(
    folder: str | None, program: EpilogueProgram | str, config: Any, *how: str
) -> Path:
    """Compile a kernel into ``folder``, unless it is there already; returns its file. ``how`` as
    ``mod.kernel_name`` takes it, for this process's architecture. Raises what QuACK raises."""
    host = quack.gemm_runtime.host
    # This process may have started under another environment.
    quack.cache.CACHE_DIR = folder
    if (path := kernel_file(program, config, *how)).exists():
        return path
    # Only a launch needs this number, and only a GPU has it.
    host.get_max_active_clusters = lambda *_, **__: 0
    # A kernel that this worker has in memory would not be saved again.
    *reading, _ = how
    if isinstance(program, str):
        from coda_inductor.mainloop.experts import compile_gradient

        compile_gradient(program, config, reading[-1])
        return path
    load(program, reading[-1])._plan_cache.clear()
    host._compile_gemm_epi.cache_clear()
    build(program, config, *reading)
    return path
