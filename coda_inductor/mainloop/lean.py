# SPDX-License-Identifier: Apache-2.0
"""An epilogue with small buffers, so that the main loop has more of shared memory.

With QuACK's buffers (four stages of each tile that is loaded, two of each stored, 32 columns wide)
and a heavy epilogue, a 128 x 128 tile has five steps of A and B in flight instead of seven, and
these hide the latency of memory: 511 us with five, 565 with four, 690 with three (dSwiGLU, M = N =
8192, K = 2048, H100). A *lean* epilogue is 16 columns wide and has two stages of everything. Its
fewer registers are worth as much: at 32 columns, 128 x 192 accumulators spill.
"""

import cutlass.cute as cute

_COLUMNS = 16
_STAGES = 2
_MAX_LOAD_STAGES = 5
#: Barriers, and the alignment of A and B, which follow the epilogue's buffers.
_RESERVED_BYTES = 2048


class LeanEpilogue:  # a mixin for QuACK kernel classes
    """Makes the epilogue lean if ``lean`` is set on the kernel object before it is traced: on
    Hopper, for programs that load tiles."""

    lean = False

    def _compute_tile_shape_or_override(self, *args, **kwargs):
        rows, columns = super()._compute_tile_shape_or_override(*args, **kwargs)  # type: ignore[misc]
        return (rows, _COLUMNS) if self.lean else (rows, columns)

    def _compute_stages(self, cta_tile, epi_tile, *args, **kwargs):
        """The number of stages: (of A and B, of each store, of each load)."""
        if not self.lean:
            return super()._compute_stages(cta_tile, epi_tile, *args, **kwargs)  # type: ignore[misc]
        a_dtype, _, d_dtype, c_dtype, epilogue_args, capacity, _, warp_shape = args
        other = self.epi_smem_bytes(epilogue_args, cta_tile, epi_tile, warp_shape)  # type: ignore[attr-defined]
        area = cute.size(cute.shape(epi_tile))
        store = other.d_stage + (area * d_dtype.width // 8 if d_dtype is not None else 0)
        load = other.c_stage + (area * c_dtype.width // 8 if c_dtype is not None else 0)
        step = (cta_tile[0] + cta_tile[1]) * cta_tile[2] * a_dtype.width // 8
        left = capacity - _RESERVED_BYTES - other.unstaged - _STAGES * (store + load)
        stages, left = divmod(left, step)
        more = min(left // load, _MAX_LOAD_STAGES - _STAGES)
        return stages, _STAGES + (left - more * load) // store, _STAGES + more
