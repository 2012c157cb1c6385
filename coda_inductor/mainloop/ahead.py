# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled into QuACK's on-disk cache, in processes that cannot see the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import quack.cache
import quack.cache.jit
import quack.gemm_runtime.host
from quack.cache.async_compile import _pool_initializer

from coda_inductor.mainloop.build import build
from coda_inductor.mainloop.mod import codegen_hash, load
from coda_inductor.program import EpilogueProgram


def prepare(arch: str) -> None:
    """Compile for ``arch`` in this process, e.g. "90"."""
    _pool_initializer(arch, f"sm_{arch}a")


def cache_folder() -> str | None:
    """Where QuACK keeps kernels; None if nowhere."""
    return quack.cache.CACHE_DIR


def version_folder() -> Path:
    """What is in it of this version of QuACK's sources."""
    cache = quack.cache.jit
    return cache.get_cache_path() / cache._compute_source_fingerprint()


def marker_folder() -> Path:
    """Markers hold for one version of everything that turns a program into code."""
    return version_folder() / f"coda_{codegen_hash()}"


def compile_to_disk(program: EpilogueProgram, config: Any, folder: str | None, **how: Any) -> Path:
    """Compile a kernel into ``folder``; returns its file. ``how``: the majors of A and B and how
    they are read, as ``build`` takes them.

    Raises whatever QuACK or CuTeDSL raises.
    """
    cache, host = quack.cache.jit, quack.gemm_runtime.host
    # The server may have started under another environment.
    quack.cache.CACHE_DIR = folder
    # Only a launch needs this number, and only a GPU knows it.
    host.get_max_active_clusters = lambda *_, **__: 0
    # A kernel that this worker has in memory would be neither hashed nor saved again.
    load(program, how["swap_lanes"], how["joined"])._plan_cache.clear()
    host._compile_gemm_epi.cache_clear()
    names: list[str] = []
    key_to_hash = cache._key_to_hash

    def record(key: tuple) -> str:
        names.append(key_to_hash(key))
        return names[-1]

    cache._key_to_hash = record
    try:
        build(program, config, **how)
    finally:
        cache._key_to_hash = key_to_hash
    return version_folder() / f"{names[-1]}.o"
