# SPDX-License-Identifier: Apache-2.0
"""Can kernels run here, and can this site be one? Reasons, never exceptions."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os

import torch

from coda_inductor.kernels.ports import ports
from coda_inductor.program import EpilogueProgram
from coda_inductor.runtime.config import arch_of, legal_configs
from coda_inductor.runtime.requirements import CUTEDSL, QUACK, Range

_ARCHS = (9, 10, 11, 12)
_HALF = ("bfloat16", "float16")


@functools.lru_cache(maxsize=64)
def kernel_stack(device: torch.device | None = None) -> str | None:
    """Why no kernel can run in this process on ``device`` (None: the current CUDA device), or None
    if they can. Imports no kernel library."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return (
                f"no CUDA device is available: torch {torch.__version__} is built without CUDA, "
                "an NVIDIA GPU needs a build with it"
            )
        return (
            "no CUDA device is available: torch sees none, nvidia-smi and CUDA_VISIBLE_DEVICES "
            "may say why"
        )
    arch = torch.cuda.get_device_capability(device)
    if arch[0] not in _ARCHS:
        return f"compute capability {arch[0]}.{arch[1]} is not supported: Hopper or newer is needed"
    return library_stack()


@functools.lru_cache(maxsize=1)
def library_stack() -> str | None:
    """Why no kernel can be compiled here, device or not, or None."""
    if (why := _missing(QUACK) or _missing(CUTEDSL)) is not None:
        return why
    if importlib.util.find_spec("cutlass") is None:
        return (
            "nvidia-cutlass-dsl is installed without its libraries (no module cutlass): "
            "pip install --force-reinstall 'coda-inductor[cuda]'"
        )
    if (cache := os.environ.get("QUACK_CACHE_ENABLED", "1")) != "1":  # as QuACK reads it
        return (
            f"QUACK_CACHE_ENABLED={cache} turns off QuACK's disk cache, through which compile "
            "workers hand over their kernels: unset it"
        )
    return None


def _missing(needed: Range) -> str | None:
    """Why a kernel library cannot be used, by its version, or None."""
    try:
        version = importlib.metadata.version(needed.package)
    except importlib.metadata.PackageNotFoundError:
        return f"{needed.package} is not installed: pip install 'coda-inductor[cuda]'"
    if needed.holds(version):
        return None
    return (
        f"{needed.package} {version} is installed, >={needed.low},<{needed.high} is needed: "
        f"pip install '{needed.spec}'"
    )


def unaligned(name: str, x: torch.Tensor) -> str | None:
    """Why a kernel would have to copy the matrix ``x`` at every call, by what is known before it,
    or None: TMA reads from multiples of 16 bytes."""
    step = 16 // x.element_size()
    strides = [s for s, size in zip(x.stride(), x.shape, strict=True) if size != 1 and s != 1]
    for what, value in [("storage offset", x.storage_offset()), *(("stride", s) for s in strides)]:
        if isinstance(value, int) and value % step:
            return f"{name} has a {what} of {value} elements, which is no multiple of 16 bytes"
    return None


def unsupported(
    program: EpilogueProgram, n: int, k: int, *, b_major: str = "k", device=None
) -> str | None:
    """Why ``program`` on (M, ``k``) x (``k``, ``n``) cannot be a kernel, or None.

    ``b_major`` is the dimension of B with stride 1: "k" (a linear layer's weight) or "n".
    """
    if program.in_dtype not in _HALF:
        return f"a {program.in_dtype} GEMM has no kernel: only bfloat16 and float16 have"
    if n % 8 or k % 8 or not k or not n:
        return f"N={n} and K={k} must be positive multiples of 8 (16-byte rows)"
    if not program.stores:
        return "a program without a tile store has no kernel"
    dtypes = [o.dtype for o in program.operands] + [s.dtype for s in program.stores]
    if "float64" in dtypes:
        return "float64 operands and stores have no kernel"
    mapping = ports(program)
    same = next((o.value for o in program.outputs if o.value in mapping.uniform), None)
    if same is not None:
        return f"{same!r} is one value for the whole tile: nothing to fuse"
    if program.paired:
        wide = next((s for s in program.stores if s.dtype not in _HALF), None)
        if wide is not None:
            return f"store {wide.name!r}: paired stores are 16-bit, not {wide.dtype}"
        if b_major != "k":
            return "paired weights must be K-major (out_features x in_features)"
    if not legal_configs(program, arch_of(device)):
        return "its tile loads and stores need more shared memory than a kernel has"
    return None
