# SPDX-License-Identifier: Apache-2.0
"""EpiMod + config -> QuACK launch plan. Compiles the kernel, or loads it from the disk cache."""

from __future__ import annotations

import torch
from quack.cute_dsl_utils import get_device_capacity
from quack.gemm_runtime.host import GemmEpiPlan

from coda_inductor.codegen.ports import ports
from coda_inductor.mainloop.mod import load
from coda_inductor.mainloop.plan import run as run_gemm_epi_plan
from coda_inductor.mainloop.resources import DELTA_DIVISOR
from coda_inductor.program import EpilogueProgram

__all__ = ["build", "dummy_arguments", "run_gemm_epi_plan"]


def build(
    program: EpilogueProgram,
    config,
    a_major: str = "k",
    b_major: str = "k",
    swap_lanes: bool = False,
    joined: str = "",
    *,
    device: torch.device | str = "meta",
) -> GemmEpiPlan:
    """Compile for any M, N, K: only dtypes, majors and the config are compiled in.

    ``a_major``/``b_major``: which dimension of A (M x K) and B (K x N) has stride 1: "m", "k", "n".
    ``swap_lanes``, of paired programs: the second weight lies lower in memory. ``joined``: A and B
    are the two terms of a sum, read in place as ``mainloop.join`` says, whose addresses have the
    same order ("straight") or not ("crossed"); "" for one product.
    ``device``: "meta" needs QUACK_ARCH; a CUDA device is asked for its architecture.

    Raises:
        ValueError: there is no such kernel; the compiler might end the process.
        Exception: whatever QuACK or CuTeDSL raises.
    """
    if _arch(device) == 9 and (why := config.unwritten) is not None:
        raise ValueError(f"{config} has no kernel: {why}")
    if joined and config.split_k > 1:
        raise ValueError(f"{config} splits K, and half of a part would be taken for half of K")
    if program.fp8 and (joined or (a_major, b_major) != ("k", "k")):
        raise ValueError("FP8 operands are read along K, and one product at a time")
    mod = load(program, swap_lanes, joined)
    m, n, k = 2 * config.tile_m, 2 * config.tile_n, 128
    a, b, d, c, values = dummy_arguments(program, config, m, n, k, a_major, b_major, device)
    values.update({distance.name: DELTA_DIVISOR for distance in mod.distances})
    # The scheduler of Blackwell is dynamic in hardware; Hopper's counts in memory.
    blackwell = _arch(device) >= 10
    counter = torch.empty(1, dtype=torch.int32, device=device) if config.dynamic else None
    return mod.gemm(
        a,
        b,
        d,
        c,
        epi_args=values,
        tile_M=config.tile_m,
        tile_N=config.tile_n,
        cluster_M=config.cluster_m,
        cluster_N=config.cluster_n,
        pingpong=config.pingpong,
        is_dynamic_persistent=config.dynamic or blackwell,
        tile_count_semaphore=counter,
        max_swizzle_size=config.swizzle,
        split_k=config.split_k,
        b_kn=True,
        post_init_attrs=(("lean", True),) if config.lean else (),
        _launch=False,
    )


def dummy_arguments(program, config, m, n, k, a_major, b_major, device):
    """Tensors with the dtypes and majors of a real call, but for distances: (A, B, D, C, epilogue
    values)."""
    mapping = ports(program)

    def empty(*shape, dtype):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    def matrix(rows, columns, row_major, dtype):
        if row_major:
            return empty(rows, columns, dtype=dtype)
        return empty(columns, rows, dtype=dtype).t()

    lanes = 2 if program.paired else 1
    shapes = {"tile": (m, n), "row": (lanes * n,), "col": (m,), "scalar": ()}
    shapes["table"] = (m, program.head)
    values = {
        o.name: empty(*shapes[o.kind], dtype="float32" if o.kind == "scalar" else o.dtype)
        for o in program.operands
    }
    c = values.pop(mapping.c) if mapping.c else None
    values.update({step.name: program.head for step in mapping.across})
    values.update({s.name: empty(m, n, dtype=s.dtype) for s in mapping.aux})
    tile_rows = config.cta_tile_m(_arch(device))
    partials = {"row": (m, -(-lanes * n // config.tile_n)), "col": (m // tile_rows, lanes * n)}
    values.update({s.name: empty(*partials[s.axis], dtype="float32") for s in mapping.sinks})
    d = empty(m, n, dtype=mapping.d.dtype) if mapping.d is not None else None
    a = matrix(m, k, a_major == "k", program.a_dtype)
    b = matrix(k, lanes * n, b_major == "n", program.b_dtype)
    return a, b, d, c, values


def _arch(device) -> int:
    return get_device_capacity(torch.device(device))[0]
