# SPDX-License-Identifier: Apache-2.0
"""Can a site be a kernel? Reasons, never exceptions."""

from __future__ import annotations

import torch

from coda_inductor.codegen.ports import ports
from coda_inductor.mainloop.availability import unsupported_gpu
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.select.config import legal_configs
from coda_inductor.select.device import arch_of

_HALF = ("bfloat16", "float16")


def unaligned(name: str, x: torch.Tensor) -> Refusal | None:
    """Why a kernel would have to copy the matrix ``x`` at every call, by what is known before it,
    or None: TMA reads from multiples of 16 bytes."""
    step = 16 // x.element_size()
    strides = [s for s, size in zip(x.stride(), x.shape, strict=True) if size != 1 and s != 1]
    for what, value in [("storage offset", x.storage_offset()), *(("stride", s) for s in strides)]:
        if isinstance(value, int) and value % step:
            text = f"{name} has a {what} of {value} elements, which is no multiple of 16 bytes"
            return refuse("unaligned", text, failure=True)
    return None


def unsupported(
    program: EpilogueProgram, n: int, k: int, *, b_major: str = "k", device=None
) -> Refusal | None:
    """Why ``program`` on (M, ``k``) x (``k``, ``n``) cannot be a kernel, or None.

    ``b_major`` is the dimension of B with stride 1: "k" (a linear layer's weight) or "n".
    """
    why = _unsupported(program, n, k, b_major, arch_of(device))
    return None if why is None else refuse(*why, failure=True)


def _unsupported(
    program: EpilogueProgram, n: int, k: int, b_major: str, arch: int
) -> tuple[str, str] | None:
    """A reason's code and text."""
    if program.a_dtype not in _HALF:
        dtype = program.a_dtype
        return "kernel-dtype", f"a {dtype} GEMM has no kernel: only bfloat16 and float16 have"
    if n % 8 or k % 8 or not k or not n:
        text = f"N={n} and K={k} must be positive multiples of 8 (16-byte rows)"
        return "not-multiple-of-8", text
    if not program.stores:
        return "no-store", "a program without a tile store has no kernel"
    dtypes = [o.dtype for o in program.operands] + [s.dtype for s in program.stores]
    if "float64" in dtypes:
        return "kernel-dtype", "float64 operands and stores have no kernel"
    mapping = ports(program)
    same = next((o.value for o in program.outputs if o.value in mapping.uniform), None)
    if same is not None:
        return "constant-tile", f"{same!r} is one value for the whole tile: nothing to fuse"
    if program.paired:
        wide = next((s for s in program.stores if s.dtype not in _HALF), None)
        if wide is not None:
            text = f"store {wide.name!r}: paired stores are 16-bit, not {wide.dtype}"
            return "paired-store-wide", text
        if b_major != "k":
            text = "paired weights must be K-major (out_features x in_features)"
            return "paired-weight-layout", text
    if (old := unsupported_gpu(arch)) is not None:
        return old.code, old.text
    if not legal_configs(program, arch):
        text = "its tile loads and stores need more shared memory than a kernel has"
        return "shared-memory", text
    return None
