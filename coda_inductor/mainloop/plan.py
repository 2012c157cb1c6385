# SPDX-License-Identifier: Apache-2.0
"""Launching a plan: the memory that it needs.


- the dynamic scheduler of Hopper counts the tiles that were handed out;
- a product whose K is split keeps each tile's sum so far, and whose turn it is to add to it.

Both start at zero. They are allocated and cleared for each launch, on its stream: two launches at
the same time, on two streams or of two replays of CUDA graphs, share nothing, and a graph that was
captured clears them itself at each replay.

A kernel leaves the counter at zero, so that one a stream would do without clearing. But a replay
runs on any stream, and while CUDA graphs are captured, or warmed up for it, what is allocated is
the graphs' to hand out again: there is no moment at which memory to keep could be had for sure.
"""

from __future__ import annotations

import torch
from quack.gemm_runtime.host import GemmEpiPlan, run_gemm_epi_plan


def counter(a: torch.Tensor) -> torch.Tensor:
    """The dynamic scheduler's, for one launch with ``a``: (1,) int32."""
    return a.new_zeros(1, dtype=torch.int32)


def run(plan: GemmEpiPlan, a, b, d, c, values) -> None:
    """Launch ``plan`` on the current stream; tensors as ``build.dummy_arguments`` has them.

    Raises whatever QuACK or the driver raises.
    """
    semaphore = counter(a) if plan.scheduler_uses_semaphore else None
    run_gemm_epi_plan(plan, a, b, d, c, values, tile_count_semaphore=semaphore)
