# SPDX-License-Identifier: Apache-2.0
"""Is a fused site expected to win? A fused site must never be slower than the unfused ops.

Times come from measurements or else from the roofline (``roofline``). The alternative is what
Inductor would run: cuBLAS and elementwise kernels.
"""

from collections.abc import Sequence

from coda_inductor.gpu import H100, Gpu
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.select.roofline import MARGIN, product_us
from coda_inductor.select.site import Site

#: Safety factor for launch times: processors differ, and a training step's host time varies by a
#: quarter from one step to the next.
_HOST = 1.25


def host_bound(
    gemms: Sequence[tuple[int, int, int]], gpu: Gpu = H100, *, training: bool = False
) -> Refusal | None:
    """The reason if all GEMMs of a graph, each (M, N, K), are left to cuBLAS, or None. The GPU
    would wait for the host, and our launches take the host longer than cuBLAS's. CUDA graphs remove
    this limit: the host then launches no kernels."""
    us = sum(product_us(m, n, k, gpu) for m, n, k in gemms)
    call_us = gpu.host_trained_us if training else gpu.host_gemm_us
    host = _HOST * ((gpu.host_step_us if training else gpu.host_call_us) + len(gemms) * call_us)
    if us >= host:
        return None
    text = (
        f"too small: the graph's GEMMs take {us:.0f} us, launching them up to {host:.0f} us, so "
        "the host is the limit (options['gate'] = 'always' fuses anyway)"
    )
    return refuse("too-small", text)


def unmeasured(gpu: Gpu) -> Refusal | None:
    """The reason if GEMMs without measurements are left to cuBLAS on ``gpu``, or None: no kernel is
    expected to win."""
    if gpu.rated:
        return None
    text = (
        f"there are no measurements on {gpu.short} (compute capability {gpu.capability[0]}.x), so "
        "no kernel is expected to win (python -m coda_inductor tune measures, options['gate'] = "
        "'always' fuses anyway)"
    )
    return refuse("gpu-not-measured", text)


def loses(
    site: Site, fused: float, unfused: float,
    code: str = "expected-slower", least: float = MARGIN - 1,
) -> Refusal | None:  # fmt: skip
    """The reason if ``site`` should not be fused, or None. The microseconds are expected or
    measured, as ``code`` says, and a kernel must be faster by ``least`` of its time."""
    if site.after and _only_statistics(site.program):
        text = "its product is stored anyway for an elementwise kernel: statistics save nothing"
        return refuse("statistics-only", text)
    if fused * (1 + least) <= unfused:
        return None
    text = f"{code.partition('-')[0]} {fused:.0f} us fused, {unfused:.0f} us unfused"
    short = f": faster by less than {100 * least:.1f} %" if fused < unfused else ""
    return refuse(code, text + short)


def norm_loses(m: int, n: int, k: int, width: int, *, gpu: Gpu = H100) -> Refusal | None:
    """The reason if it is expected to be slower to defer a LayerNorm over (m, k) past GEMMs with
    ``n`` columns in total, or None. ``width``: bytes per element. Deferral saves the kernel that
    reads the product before the norm and writes the norm's result. It costs one more read of the
    weights, for the vectors gamma^T W and beta^T W."""
    saved_us = 2 * m * k * width / gpu.bytes_per_us + gpu.launch_us
    cost_us = n * k * width / gpu.bytes_per_us + gpu.launch_us
    if cost_us <= saved_us:
        return None
    text = f"expected {cost_us:.0f} us for reading its weights again, and {saved_us:.0f} us saved"
    return refuse("layer-norm-slower", text)


def _only_statistics(program: EpilogueProgram) -> bool:
    """Are the products stored unchanged, and only summed over N? This happens with a norm between a
    GEMM and a residual (Gemma 2): the norm's kernel must read the product in any case."""
    unchanged = all(store.value in program.accs for store in program.stores)
    sums = all(reduce.axis == "row" and reduce.combine == "add" for reduce in program.reduces)
    return unchanged and sums
