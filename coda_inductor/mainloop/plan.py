# SPDX-License-Identifier: Apache-2.0
"""Launching a plan: what of a config is decided at each launch, and the memory that it needs.

How wide a band of tiles is walked through, and how many processors take part, are arguments of the
launch: a config with another limit has the same kernel. What needs memory of its own:

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


def limited(plan: GemmEpiPlan, processors: int) -> GemmEpiPlan:
    """``plan`` as CTAs for so many processors, but at least one cluster; 0 is as many as there are.

    For more than there are CTAs run one after the other, each with its share of the tiles: where
    one has ended, a kernel of another stream may come in.
    """
    if not processors or not plan.max_active_clusters:  # not persistent, or only compiled
        return plan
    clusters = max(processors // (plan.cluster_M * plan.cluster_N), 1)
    scheduler = plan.scheduler_static
    if scheduler is not None:
        kind = type(scheduler.max_active_clusters)
        scheduler = scheduler._replace(max_active_clusters=kind(clusters))
    return plan._replace(max_active_clusters=clusters, scheduler_static=scheduler)


def counter(a: torch.Tensor) -> torch.Tensor:
    """The dynamic scheduler's, for one launch with ``a``: (1,) int32."""
    return a.new_zeros(1, dtype=torch.int32)


def run(plan: GemmEpiPlan, a, b, d, c, values) -> None:
    """Launch ``plan`` on the current stream; tensors as ``build.dummy_arguments`` has them.

    Raises whatever QuACK or the driver raises.
    """
    semaphore = counter(a) if plan.scheduler_uses_semaphore else None
    run_gemm_epi_plan(plan, a, b, d, c, values, tile_count_semaphore=semaphore)
