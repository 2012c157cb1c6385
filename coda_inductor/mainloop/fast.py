# SPDX-License-Identifier: Apache-2.0
"""Fast accumulation of FP8 products on Hopper, as ``aten._scaled_mm`` has it.

The multiplier's accumulator keeps fewer bits than float32. QuACK adds it to float32 registers at
each step of K, which takes as many again: of 128 x 128, shared by two warpgroups, both fit, larger
tiles spill. A program that allows fast accumulation lets the multiplier sum over all of K in those
larger tiles; in the small one there is nothing to gain, for that is as fast and more exact (H200:
659, 672, 288 and 206 us, where the best fast tile took 654, 702, 315 and 206). QuACK's kernel class
has an argument for fast accumulation, which none of its functions passes.
"""

from __future__ import annotations

_HOPPER = 90
#: The tile whose sums fit in float32, where two warpgroups share it.
_SMALL = (128, 128)


class FastAccumulation:  # a mixin for QuACK kernel classes
    """Sums over all of K where the products are made, if there is no room for better. Only Hopper's
    class has the choice, and an argument for it."""

    arch: int

    def __init__(self, acc_dtype, a_dtype, tile, cluster, *, pingpong=False, **others):
        slow = self.arch != _HOPPER or (tuple(tile[:2]) == _SMALL and not pingpong)
        fast = {} if slow else {"fp8_fast_accum": True}
        super().__init__(  # type: ignore[call-arg]
            acc_dtype, a_dtype, tile, cluster, pingpong=pingpong, **others, **fast
        )
