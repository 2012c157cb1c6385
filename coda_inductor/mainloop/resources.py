# SPDX-License-Identifier: Apache-2.0
"""QuACK epilogue resources of our own: masked reductions, scalars on the device, a row for each
part of a batch, the distance between two allocations, and a maximum that keeps NaN.

QuACK's sums rely on zeros in the lanes beyond the matrix, which not every value has there
(``exp(x)``, ``x + bias``), see ``ports.Sink.masked``.
"""

import functools

import cutlass
import cutlass.cute as cute
import quack.epilogue.ops
from cutlass import Int64, const_expr
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import (
    ColVecReduce,
    EpiOp,
    OnlineLSEReduce,
    RowVecLoad,
    RowVecReduce,
    Scalar,
    VecReduce,
)

from coda_inductor.codegen.ports import Sink
from coda_inductor.mainloop.entropy import RowEntropy
from coda_inductor.mainloop.tensors import DELTA_DIVISOR


class _MaskedSum(VecReduce):
    def _mask_oob_active(self):
        return True

    @cute.jit
    def _mask_oob(self, frag, coords, limit, tile_shape_mn):
        stride = (1, 0) if const_expr(self._reduce_dim() == 0) else (0, 1)
        offsets = cute.composition(cute.make_layout(tile_shape_mn, stride=stride), coords.layout)
        limit_here = limit - coords[0][self._reduce_dim()]
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            frag[i] = frag[i] if cute.crd2idx(i, offsets) < limit_here else 0.0


class MaskedRowSum(_MaskedSum, ColVecReduce):
    """Sums over N, with partials (M, n_tiles)."""


class MaskedColSum(_MaskedSum, RowVecReduce):
    """Sums over M, with partials (m_tiles, N)."""


def reduction(sink: Sink) -> EpiOp:
    """The QuACK resource of one reduction."""
    if sink.masked:
        return (MaskedRowSum if sink.axis == "row" else MaskedColSum)(sink.name)
    if sink.combine == "logsumexp":
        return OnlineLSEReduce(sink.name)  # masks the lanes beyond N itself
    if sink.combine == "entropy":
        return RowEntropy(sink.name)
    kind = ColVecReduce if sink.axis == "row" else RowVecReduce
    combine = _NaNMax("max") if sink.combine == "max" else sink.combine
    return kind(sink.name, combine=combine, scaled=sink.factors is not None)


class _NaNMax(str):
    """The name of a maximum that keeps NaN, like torch's. QuACK's own drops NaN."""


_quacks_combine = quack.epilogue.ops._vec_reduce_combine


def _combine(a, b, combine):
    """Combine two partial results: by QuACK's function, or for a maximum by ours."""
    if isinstance(combine, _NaNMax):
        return cute.arch.fmax(a, b, nan=True)
    return _quacks_combine(a, b, combine)


quack.epilogue.ops._vec_reduce_combine = _combine


class DeviceScalar(Scalar):
    """A 0-dim float32 tensor that the kernel reads. QuACK's check is skipped, because it rejects
    meta tensors of ahead-of-time compilation; the caller (``runtime.launch``) has checked."""

    def host_arg_key(self, value):
        return self.host_key_for_mode(2)

    def host_call_arg(self, value, key):
        return value.data_ptr()


class BatchLoad(RowVecLoad):
    """Loads a row of (B, N) for each of B equal parts of M. A tile covers two parts at most,
    because no tile has more rows than a part (``program.ir``). The rows of both are in shared
    memory, and each element takes the row of its part."""

    fn_port = "value"  # not the same for all rows

    def host_fake_arg(self, key, fctx):
        return make_fake_tensor(key[0], (cute.sym_int(), fctx.n), leading_dim=1, divisibility=4)

    def _tile_size(self, cta_tile_shape_mnk):
        return 2 * super()._tile_size(cta_tile_shape_mnk)

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        parts = cute.size(param, mode=[0])
        size = ctx.varlen_manager.len_m(ctx.batch_idx) // parts
        start = ctx.tile_coord_mnkl[0] * ctx.tile_M
        first = min(start // size, parts - 1)
        second = min(first + 1, parts - 1)
        layout = cute.make_layout(ctx.tile_N)
        halves = [cute.make_tensor(smem_tensor.iterator + i * ctx.tile_N, layout) for i in (0, 1)]
        row_a = RowVecLoad.begin(self, gemm, param[first, None], halves[0], ctx)
        row_b = RowVecLoad.begin(self, gemm, param[second, None], halves[1], ctx)
        tile = ctx.partition_for_epilogue_fn(cute.make_identity_tensor((ctx.tile_M, ctx.tile_N)))
        if const_expr(ctx.tiled_copy_t2r is not None):
            tile = ctx.tiled_copy_r2s.retile(tile)
        fragment = cute.make_rmem_tensor(ctx.tRS_rD_layout, gemm.acc_dtype)
        return row_a, row_b, tile, (first + 1) * size - start, fragment

    @cute.jit
    def begin_loop(self, gemm, state, epi_coord):
        row_a, row_b, tile, rows, fragment = state
        first = RowVecLoad.begin_loop(self, gemm, row_a, epi_coord)
        second = RowVecLoad.begin_loop(self, gemm, row_b, epi_coord)
        coords = cute.group_modes(tile, 3, cute.rank(tile))[None, None, None, epi_coord]
        stride = cute.make_layout(gemm.cta_tile_shape_mnk[:2], stride=(1, 0))
        offsets = cute.composition(stride, coords.layout)
        rows_here = rows - coords[0][0]
        for i in cutlass.range(cute.size(fragment), unroll_full=True):
            fragment[i] = first[i] if cute.crd2idx(i, offsets) < rows_here else second[i]
        return fragment


class Distance(EpiOp):
    """The distance of two allocations, in elements, as a launch argument (``readings.pair``)."""

    def host_arg_key(self, value):
        return None if value is None else ("int64",)

    def host_fake_arg(self, key, fctx):
        return Int64(DELTA_DIVISOR)

    def host_call_arg(self, value, key):
        return _int64(value)

    def arg_spec_type(self, const=False):
        return Int64

    def param_fields(self):
        return [(self.name, object, None)]

    def to_params(self, gemm, args):
        return {self.name: getattr(args, self.name)}


@functools.lru_cache(maxsize=4096)
def _int64(value: int) -> Int64:
    """``value`` as Int64, cached: creating one takes a microsecond, and steps repeat distances."""
    return Int64(value)
