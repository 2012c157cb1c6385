# SPDX-License-Identifier: Apache-2.0
"""Can a site be a kernel? The functions return reasons and raise nothing."""

import torch

from coda_inductor.codegen.ports import ports
from coda_inductor.mainloop.availability import unsupported_gpu
from coda_inductor.program.dtypes import FP8, HALF_NAMES
from coda_inductor.program.ir import OF_ROWS
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.select.config import every_config, legal_configs, whole_heads
from coda_inductor.select.site import Site


def unaligned(name: str, x: torch.Tensor) -> Refusal | None:
    """The reason if a kernel must copy the matrix ``x`` at every call, or None, as far as that is
    known before a call. TMA reads from multiples of 16 bytes."""
    step = 16 // x.element_size()
    strides = [s for s, size in zip(x.stride(), x.shape, strict=True) if size != 1 and s != 1]
    for label, value in [("storage offset", x.storage_offset()), *(("stride", s) for s in strides)]:
        if isinstance(value, int) and value % step:
            text = f"{name} has a {label} of {value} elements, which is not a multiple of 16 bytes"
            return refuse("unaligned", text, failure=True)
    return None


def _heads(site: Site) -> tuple[str, str] | None:
    """(code, text) of a reason that concerns heads, or None."""
    program, arch, head = site.program, site.arch, site.program.head
    if site.n % head:
        return "kernel-form", f"N={site.n} is not a multiple of a head's {head} columns"
    # A thread has the same columns of each period, and neighbors (``mainloop.heads``).
    for step in program.steps:
        if step.op == "swap" and step.args[2] != 1 and step.args[2] % arch.period:
            text = f"it exchanges columns at distance {step.args[2]:g}: kernels support 1 "
            return "kernel-form", text + f"and multiples of {arch.period}"
    if not any(whole_heads(program, config, arch) for config in every_config(program, arch)):
        return "kernel-form", f"no kernel has tiles of whole heads of {head} columns"
    return None


def unsupported(site: Site) -> tuple[str, str] | None:
    """(code, text) of the reason why ``site`` cannot be a kernel, or None: ``Site.refusal``."""
    program, n, k = site.program, site.n, site.k
    if program.a_dtype not in (*HALF_NAMES, *FP8):
        dtype = program.a_dtype
        text = f"there is no kernel for a {dtype} GEMM, only for bfloat16, float16 and scaled FP8"
        return "kernel-dtype", text
    if (why := site.reading.refuses(site)) is not None:
        return why
    step = 16 if program.fp8 else 8
    if n % step or k % step or not k or not n:
        text = f"N={n} and K={k} must be positive multiples of {step} (16-byte rows)"
        return ("not-multiple-of-16" if program.fp8 else "not-multiple-of-8"), text
    if not program.stores and not any(r.combine in OF_ROWS for r in program.reduces):
        return "kernel-form", "there is no kernel for a program without a tile store"
    dtypes = [o.dtype for o in program.operands] + [s.dtype for s in program.stores]
    if "float64" in dtypes:
        return "kernel-dtype", "there is no kernel with float64 operands or stores"
    mapping = ports(program)
    uniform = next((o.value for o in program.outputs if o.value in mapping.uniform), None)
    if uniform is not None:
        return "kernel-form", f"{uniform!r} is one value for the whole tile: nothing to fuse"
    if (old := unsupported_gpu(site.arch)) is not None:
        return old.code, old.text
    if program.head and (why := _heads(site)) is not None:
        return why
    if not legal_configs(program, site.arch):
        text = "its tile loads and stores need more shared memory than a kernel has"
        return "shared-memory", text
    return None
