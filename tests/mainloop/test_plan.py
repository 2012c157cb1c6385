# SPDX-License-Identifier: Apache-2.0
"""What a launch adds to a plan: limits, and memory that starts at zero each time."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("quack")

from coda_inductor.mainloop import plan as launching
from coda_inductor.mainloop.plan import limited, run


class Scheduler(NamedTuple):
    max_active_clusters: int = 66


class Plan(NamedTuple):
    max_active_clusters: int = 66
    scheduler_static: Scheduler | None = Scheduler()
    cluster_M: int = 2
    cluster_N: int = 1
    scheduler_uses_semaphore: bool = False


@pytest.mark.parametrize(
    ("processors", "clusters"), [(0, 66), (132, 66), (1000, 500), (101, 50), (2, 1), (1, 1)]
)
def test_a_limit_is_in_whole_clusters(processors, clusters):
    plan = limited(Plan(), processors)
    assert plan.max_active_clusters == plan.scheduler_static.max_active_clusters == clusters
    dynamic = limited(Plan(scheduler_static=None), processors)
    assert (dynamic.max_active_clusters, dynamic.scheduler_static) == (clusters, None)


def test_a_kernel_that_is_not_persistent_has_no_limit():
    plan = Plan(max_active_clusters=0, scheduler_static=Scheduler(0))
    assert limited(plan, 100) == plan


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_launch_counts_from_zero_in_memory_of_its_own(dynamic, monkeypatch):
    seen = []

    def launch(plan, *arguments, tile_count_semaphore):
        seen.append(tile_count_semaphore)
        if tile_count_semaphore is not None:
            assert (tile_count_semaphore.tolist(), tile_count_semaphore.dtype) == ([0], torch.int32)
            tile_count_semaphore.add_(5)

    monkeypatch.setattr(launching, "run_gemm_epi_plan", launch)
    for _ in range(2):
        run(Plan(scheduler_uses_semaphore=dynamic), torch.empty(1), None, None, None, {})
    assert (seen == [None, None]) is not dynamic
    assert not dynamic or seen[0].data_ptr() != seen[1].data_ptr()
