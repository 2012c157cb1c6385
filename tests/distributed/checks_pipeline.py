# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: a stage's input and its gradient come from other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from checks_fsdp import BLOCK, HOW, LAYERS, assert_fired
from decoder import batches, decoder, fresh, loss_of, single
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

PARTS = 2  # of a batch


class Stage(nn.Module):
    """The first or the last half of a decoder, blocks compiled."""

    def __init__(self, whole: nn.Module, first: bool):
        super().__init__()
        half = LAYERS // 2
        self.layers = whole.layers[:half] if first else whole.layers[half:]
        for block in self.layers:
            block.compile(**HOW)
        self.before = whole.embedding if first else nn.Identity()
        self.behind = nn.Identity() if first else nn.Sequential(whole.norm, whole.head)

    def forward(self, x):
        x = self.before(x)
        for block in self.layers:
            x = block(x)
        return self.behind(x)


def check_stages_of_blocks():
    fresh()
    first = dist.get_rank() == 0
    stage = Stage(decoder(LAYERS), first)
    runs = PipelineStage(stage, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(runs, n_microbatches=PARTS, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    for tokens in batches(2):
        schedule.step(*([tokens] if first else []), target=None if first else tokens)
        optimizer.step()
        optimizer.zero_grad()
    plain = Stage(single(batches(2), LAYERS), first)
    for have, want in zip(stage.parameters(), plain.parameters(), strict=True):
        assert (have - want).norm() <= 1e-6 * want.norm()
    assert_fired(BLOCK)
