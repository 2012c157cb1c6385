# SPDX-License-Identifier: Apache-2.0
"""EpiMod + config -> QuACK launch plan. The kernel is compiled, or loaded from the disk cache."""

import torch
from quack.cute_dsl_utils import get_device_capacity
from quack.gemm_runtime.host import GemmEpiPlan

from coda_inductor.arch import arch_with
from coda_inductor.codegen.ports import ports
from coda_inductor.mainloop import store
from coda_inductor.mainloop.mod import kernel_name, load
from coda_inductor.mainloop.tensors import DELTA_DIVISOR
from coda_inductor.program import EpilogueProgram


def build(
    program: EpilogueProgram, config, a_major: str = "k", b_major: str = "k", variant: str = "", *,
    device: torch.device | str = "meta",
) -> GemmEpiPlan:  # fmt: skip
    """Compile a kernel for any M, N, K: only dtypes, majors and the config are compiled in.
    ``a_major``/``b_major``: which dimension of A (M x K) and B (K x N) has stride 1: "m", "k", "n".
    ``variant``: a variant of the reading of A and B (``mainloop.readings``). ``device``: "meta"
    needs QUACK_ARCH; a CUDA device is asked for its architecture. Raises ValueError if there is no
    such kernel, where the compiler might abort the process, and whatever QuACK or CuTeDSL raises.
    """
    capability = get_device_capacity(torch.device(device))
    arch = arch_with(capability)
    if (why := config.tile_refusal(arch)) is not None:
        raise ValueError(f"{config} has no kernel: {why}")
    mod = load(program, variant)
    if not mod.reading.suits(program, config):
        raise ValueError(f"{config} cannot read A and B so")
    m, n, k = 2 * config.tile_m, 2 * config.tile_n, 128
    a, b = mod.reading.dummies(program, m, n, k, (a_major, b_major), device)
    d, c, values = dummy_arguments(program, config.cta_tile_m(arch), config.tile_n, m, n, device)
    values.update(dict.fromkeys(mod.reading.distances, DELTA_DIVISOR))
    groups = torch.empty(b.shape[0] + 1, dtype=torch.int32, device=device) if b.dim() == 3 else None
    gathered = program.routes[1] is not None
    # The scheduler of Blackwell is dynamic in hardware; Hopper's counts in memory.
    counter = torch.empty(1, dtype=torch.int32, device=device) if config.dynamic else None
    number = "".join(map(str, capability))
    with store.named(kernel_name(program, config, a_major, b_major, variant, number)):
        return mod.gemm(
            a, b, d, c, epi_args=values, tile_M=config.tile_m, tile_N=config.tile_n,
            cluster_M=config.cluster_m, cluster_N=config.cluster_n, pingpong=config.pingpong,
            is_dynamic_persistent=config.dynamic or "counter" not in arch.features,
            tile_count_semaphore=counter, cu_seqlens_m=groups,
            A_idx=torch.empty(m, dtype=torch.int32, device=device) if gathered else None,
            b_kn=True, post_init_attrs=(("lean", True),) if config.lean else (), _launch=False,
        )  # fmt: skip


def dummy_arguments(program, tile_m, tile_n, m, n, device):
    """Tensors with the dtypes of a real call: (D, C, epilogue values)."""
    mapping = ports(program)

    def empty(*shape, dtype):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    lanes = len(program.accs)
    sizes = program.sizes(m, lanes * n, 2)
    values = {
        o.name: empty(*o.spec.shape(sizes, grouped=program.grouped), dtype=o.kernel_dtype)
        for o in program.read
    }
    c = values.pop(mapping.c) if mapping.c else None
    values.update(mapping.numbers)
    values.update({s.name: empty(m, n, dtype=s.dtype) for s in mapping.aux})
    partials = {"row": (m, -(-lanes * n // tile_n)), "col": (m // tile_m, lanes * n)}
    values.update({s.name: empty(*partials[s.axis], dtype="float32") for s in mapping.sinks})
    d = empty(m, n, dtype=mapping.d.dtype) if mapping.d is not None else None
    return d, c, values
