# SPDX-License-Identifier: Apache-2.0
"""The entropy of each row of a tile, as a QuACK epilogue resource.

Beside the largest value m and s = sum of exp(x - m), which a log-sum-exp has, it keeps t = sum of
(x - m) exp(x - m). A larger m' takes away d = m' - m: s' = exp(-d) s and t' = exp(-d) (t - d s).
The tile's entropy is log(s) - t / s, of which no term grows with the values themselves.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from quack import layout_utils
from quack.epilogue.ops import OnlineLSEReduce

#: The least exponent that counts: exp of it is 0, and 0 times it too, where -inf would give NaN.
_LEAST = -(2.0**100)


class RowEntropy(OnlineLSEReduce):
    """Entropies over N, with partials (M, n_tiles)."""

    reduce_planes = 3

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        state = OnlineLSEReduce.begin(self, gemm, param, smem_tensor, ctx)
        return (*state, cute.make_rmem_tensor(state[0].layout, Float32))

    @cute.jit
    def begin_loop(self, gemm, state, epi_coord):
        products = state[5][None, None, None, epi_coord[0], epi_coord[1]]
        if const_expr(epi_coord[self._reduce_dim()] == 0):
            cute.filter_zeros(products).fill(0.0)
        return (*OnlineLSEReduce.begin_loop(self, gemm, state, epi_coord), products)

    @cute.jit
    def _end_loop_values(self, state, epi_coord):
        products = state[5][None, None, None, epi_coord[0], epi_coord[1]]
        return (*OnlineLSEReduce._end_loop_values(self, state, epi_coord), products)

    @cute.jit
    def _moved(self, vals, largest):
        m, s, t = vals
        by = cute.arch.fmax(m - largest, Float32(_LEAST))
        scale = cute.math.exp(by, fastmath=True)
        return s * scale, (t + s * by) * scale

    @cute.jit
    def _merge(self, vals, others):
        largest = cute.arch.fmax(vals[0], others[0])
        reference = self._guard_neg_inf(largest)
        s, t = self._moved(vals, reference)
        more_s, more_t = self._moved(others, reference)
        return largest, s + more_s, t + more_t

    @cute.jit
    def _finalize(self, vals):
        return cute.math.log(vals[1], fastmath=True) - vals[2] / vals[1]

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag):
        m_acc, s_acc, coords, limit, t_acc = state
        along_n = cute.make_layout(gemm.cta_tile_shape_mnk[:2], stride=(0, 1))
        offsets, here = cute.composition(along_n, coords.layout), limit - coords[0][1]
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            frag[i] = frag[i] if cute.crd2idx(i, offsets) < here else self._NEG_INF
        rows = layout_utils.convert_layout_zero_stride(frag, m_acc.layout)
        m_rows, s_rows, t_rows = (
            layout_utils.convert_layout_zero_stride(acc, m_acc.layout)[None, 0]
            for acc in (m_acc, s_acc, t_acc)
        )
        columns = const_expr(cute.size(rows, mode=[1]))
        for i in cutlass.range(cute.size(m_rows), unroll_full=True):
            largest = m_rows[i]
            for j in cutlass.range_constexpr(columns):
                largest = cute.arch.fmax(largest, rows[i, j])
            reference = self._guard_neg_inf(largest)
            s, t = self._moved((m_rows[i], s_rows[i], t_rows[i]), reference)
            for j in cutlass.range_constexpr(columns):
                x = cute.arch.fmax(rows[i, j] - reference, Float32(_LEAST))
                e = cute.math.exp(x, fastmath=True)
                s += e
                t += e * x
            m_rows[i], s_rows[i], t_rows[i] = largest, s, t
