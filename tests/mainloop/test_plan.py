# SPDX-License-Identifier: Apache-2.0
"""What a launch adds to a plan: memory that starts at zero each time."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("quack")

from coda_inductor.mainloop import plan as launching
from coda_inductor.mainloop.plan import run


class Plan(NamedTuple):
    scheduler_uses_semaphore: bool = False


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
