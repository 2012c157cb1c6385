# SPDX-License-Identifier: Apache-2.0
"""The parts of the machine and the environment that a kernel's code depends on."""

from __future__ import annotations

import importlib.metadata
import os
import platform

#: The parts of nvidia-cutlass-dsl: the installed ones determine for which CUDA it compiles.
_VARIANTS = tuple(f"nvidia-cutlass-dsl-libs-{name}" for name in ("base", "core", "cu12", "cu13"))
#: Not the user's options: the first is a compile worker's, and QuACK's keys have the architecture;
#: the second is set by CuTeDSL itself.
_IGNORED = ("CUTE_DSL_ARCH", "CUTE_DSL_LIBS")


def environment() -> tuple[str, ...]:
    """The machine type, CuTeDSL's CUDA variants with their versions, and the ``CUTE_DSL_*``
    options. They are part of every kernel's key, so that hosts with a common home do not share
    kernels that only one of them can load."""
    options = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and name not in _IGNORED
    )
    return (platform.machine(), *_variants(), *options)


def label() -> str:
    """The environment as a folder's name, without options:
    ``x86_64-quack0.6.5-cutlass4.8.1-cu12``."""
    parts = [platform.machine() or "machine"]
    for short, name in (("quack", "quack-kernels"), ("cutlass", "nvidia-cutlass-dsl")):
        parts.append(f"{short}{version(name)}")
    return "-".join([*parts, *(v.split()[0].rsplit("-", 1)[1] for v in _variants() if "cu1" in v)])


def _variants() -> list[str]:
    variants = [f"{name} {version(name)}" for name in _VARIANTS]
    return [text for text in variants if not text.endswith(" absent")]


def version(library: str) -> str:
    """The installed version of ``library``, or "absent"."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
