"""Is a fused site expected to win? The promise is never to be slower than not fusing.

Expected times come from ``cost``: shipped H100 measurements and the model fitted to them. The
alternative is what Inductor would run: cuBLAS, then one elementwise kernel that reads the products
and the tile operands and writes the stores.
"""

from __future__ import annotations

from coda_inductor.program import EpilogueProgram
from coda_inductor.runtime.config import WIDTHS
from coda_inductor.runtime.cost import cublas_us, estimate_us

#: A launch of ours costs the host about 40 us, one of cuBLAS about 12. A layer whose square GEMMs
#: take less than that is bound by the host, and fusing makes it slower (floating-point operations
#: of a (M, K) x (K, max(N, K)) product; 16e9 are about 25 us of an H100).
MIN_OPERATIONS = 16e9
#: What an elementwise kernel of Inductor's reaches on an H100, bytes a microsecond, and its launch.
_BYTES_PER_US = 2.7e6
_LAUNCH_US = 2.0


def too_small(m: int, n: int, k: int) -> str | None:
    """Why an (m, k) x (k, n) GEMM is left to cuBLAS whatever surrounds it, or None.

    Judged by the width of the layer, not by n alone: the narrow k and v projections of a wide
    layer must not keep its norms from being fused.
    """
    if 2.0 * m * k * max(n, k) < MIN_OPERATIONS:
        return "too small: the host would be the limit (options['gate'] = 'always' fuses anyway)"
    return None


def loses(program: EpilogueProgram, m: int, n: int, k: int) -> str | None:
    """Why ``program`` on (m, k) x (k, n) is expected to be slower fused, or None. Times in us."""
    fused = estimate_us(program, m, n, k)
    width = WIDTHS[program.in_dtype]
    tiles = len(program.accs) * width
    tiles += sum(WIDTHS[o.dtype] for o in program.operands if o.kind == "tile")
    tiles += sum(WIDTHS[s.dtype] for s in program.stores)
    unfused = len(program.accs) * cublas_us(m, n, k) + m * n * tiles / _BYTES_PER_US + _LAUNCH_US
    if fused <= unfused:
        return None
    return f"expected {fused:.0f} us fused, {unfused:.0f} us unfused"
