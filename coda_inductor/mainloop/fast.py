# SPDX-License-Identifier: Apache-2.0
"""Fast accumulation of FP8 products on Hopper, as ``aten._scaled_mm`` has it.

The multiplier's accumulator keeps fewer bits than float32. QuACK adds it to float32 registers at
each step of K, which takes as many again (``select.config`` has what that leaves of tiles). A
program that asks for fast accumulation lets it sum over all of K. QuACK's kernel class has an
argument for that, which none of its functions passes.
"""

from __future__ import annotations

_HOPPER = 90


class FastAccumulation:  # a mixin for QuACK kernel classes
    """Sums over all of K where the products are made. The others do that anyway, and have no
    argument for it."""

    arch: int

    def __init__(self, *args, **kwargs):
        fast = {"fp8_fast_accum": True} if self.arch == _HOPPER else {}
        super().__init__(*args, **kwargs, **fast)
