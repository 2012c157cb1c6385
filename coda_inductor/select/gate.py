# SPDX-License-Identifier: Apache-2.0
"""Is a fused site expected to win? The promise is never to be slower than not fusing.

Expected times come from ``model``, where the very site was not measured. The alternative is what
Inductor would run: cuBLAS, then one elementwise kernel that reads the products and the tile
operands and writes the stores, then one more kernel if there are reductions over M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.program.scales import scaled
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.select.config import Config
from coda_inductor.select.device import H100, Gpu
from coda_inductor.select.model import UNSURE, cublas_us, kernel_us, product_us, table_traffic
from coda_inductor.select.site import Site

#: How much slower than expected a kernel may turn out and still win, by what is known of it.
MARGINS = {"here": 1.0, "shipped": 1.0, "measured": 1.0, "modelled": 1.01, "larger": 1.03,
           "halved": 1.03, "borrowed": 1.05, "smaller": 1.1, "unlike": math.inf,
           "turned": math.inf, "unknown": math.inf}  # fmt: skip


#: How much longer than expected launching may take and still not be the limit: processors differ,
#: and a training step's host time by a quarter from one step to the next.
_HOST = 1.25


def host_bound(
    gemms: Sequence[tuple[int, int, int]], gpu: Gpu = H100, *, training: bool = False
) -> Refusal | None:
    """Why a graph's GEMMs, each (M, N, K), are left to cuBLAS whatever surrounds them, or None:
    the GPU would wait for the host, and a launch of ours takes the host longer than one of cuBLAS.

    CUDA graphs lift this limit: the host then launches nothing.
    """
    us = sum(cublas_us(m, n, k, gpu) for m, n, k in gemms)
    each = gpu.host_trained_us if training else gpu.host_gemm_us
    host = (gpu.host_step_us if training else gpu.host_call_us) + len(gemms) * each
    if us >= _HOST * host:
        return None
    text = (
        f"too small: the graph's GEMMs take {us:.0f} us, launching them {host:.0f} us, so the host "
        "is the limit (options['gate'] = 'always' fuses anyway)"
    )
    return refuse("too-small", text)


def unmeasured(gpu: Gpu) -> Refusal | None:
    """Why GEMMs are left to cuBLAS on ``gpu`` whatever they are, or None: where nothing was
    measured, and nothing may be now, nothing is expected to win."""
    if gpu.table is not None:
        return None
    text = (
        f"nothing was measured on {gpu.short} (compute capability {gpu.arch}.x), so nothing is "
        "expected to win (options['tune'] = 'auto' measures, options['gate'] = 'always' fuses "
        "anyway)"
    )
    return refuse("gpu-not-measured", text)


def expected(site: Site, config: Config, gpu: Gpu = H100) -> tuple[float, float]:
    """Expected microseconds of ``site``: (fused, with a kernel of ``config``; unfused)."""
    program, m, n, k = site.program, site.m, site.n, site.k
    fused = kernel_us(program, config, m, n, k, site.terms, gpu)
    if site.copied:
        copied = n * sum(site.copied) * WIDTHS[program.b_dtype]
        fused += 2 * copied / gpu.bytes_per_us + gpu.launch_us
    plain = len(program.accs) * sum(product_us(program, m, n, each, gpu) for each in site.ks)
    return fused, plain + around_us(site, gpu)


def around_us(site: Site, gpu: Gpu = H100) -> float:
    """Expected microseconds of what surrounds the products of ``site`` where it is not fused."""
    program, terms = site.program, len(site.ks)
    everything = {*program.accs, *(o.name for o in program.operands)}
    made = {found.value for found in scaled(program).values()}
    written = [s for s in program.stores if s.value not in made]  # cuBLAS writes those
    if program.fp8 and not (written or program.reduces):
        return 0.0  # its scales too
    moved = float(sum(WIDTHS[s.dtype] for s in written if s.name not in site.after))
    if site.after:
        moved += _read(program, set(program.accs), terms)
        moved -= sum(WIDTHS[s.dtype] for s in program.stores if s.name in site.after)
        launches = 0
    else:
        moved += _read(program, everything, terms) + table_traffic(program, site.n)
        launches = 1
    columns = [r.value for r in program.reduces if r.axis == "col"]
    if columns:  # one pass for all sums over M
        sources = set().union(*(_sources(program, value) for value in columns))
        moved += _read(program, sources, terms)
        launches += 1
    return site.m * site.n * moved / gpu.bytes_per_us + launches * gpu.launch_us


def loses(site: Site, fused: float, unfused: float, ground: str = "measured") -> Refusal | None:
    """Why ``site``, of which so many microseconds are expected on a ``ground`` (``model.ground``),
    had better not be fused, or None."""
    if site.after and _only_statistics(site.program):
        text = "its product is stored as it is for an elementwise kernel: statistics save nothing"
        return refuse("statistics-only", text)
    if fused * MARGINS[ground] <= unfused:
        return None
    if ground == "unlike":
        return refuse("heads-unmeasured", "no program that knows heads was measured on this GPU")
    if ground == "turned":
        text = "no kernel whose left operand has its columns in memory was measured on this GPU"
        return refuse("turned-unmeasured", text)
    text = f"expected {fused:.0f} us fused, {unfused:.0f} us unfused"
    if ground in UNSURE:
        text += f" ({UNSURE[ground]})"
    return refuse("expected-slower", text)


def norm_loses(m: int, n: int, k: int, width: int, *, gpu: Gpu = H100) -> Refusal | None:
    """Why a LayerNorm over (m, k) is expected to be slower put off past GEMMs with ``n`` columns
    together, or None. ``width``: bytes an element.

    What is saved: the kernel that reads the product before the norm and writes its result. What it
    costs: the weights are read once more for the vectors gamma^T W and beta^T W.
    """
    won = 2 * m * k * width / gpu.bytes_per_us + gpu.launch_us
    lost = n * k * width / gpu.bytes_per_us + gpu.launch_us
    if lost <= won:
        return None
    text = f"expected {lost:.0f} us for reading its weights again, {won:.0f} us saved"
    return refuse("layer-norm-slower", text)


def _only_statistics(program: EpilogueProgram) -> bool:
    """Are the products stored unchanged, and only sums over N made of them? So it is with a norm
    between a GEMM and a residual (Gemma 2): its kernel reads the product, statistics or not."""
    unchanged = all(store.value in program.accs for store in program.stores)
    sums = all(reduce.axis == "row" and reduce.combine == "add" for reduce in program.reduces)
    return unchanged and sums


def _read(program: EpilogueProgram, names: set[str], terms: int) -> int:
    """Bytes an element that a kernel reads of the products, ``terms`` for each accumulator, and of
    the tile operands among ``names``."""
    products = terms * len(names & set(program.accs)) * WIDTHS[program.product_dtype]
    tiles = [o for o in program.operands if o.kind == "tile" and o.name in names]
    return products + sum(WIDTHS[o.dtype] for o in tiles)


def _sources(program: EpilogueProgram, value: str) -> set[str]:
    """``value`` and everything that it is computed from."""
    found = {value}
    for step in reversed(program.steps):
        if step.name in found:
            found |= {a for a in step.args if isinstance(a, str)}
    return found
