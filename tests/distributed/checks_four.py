# SPDX-License-Identifier: Apache-2.0
"""Four ranks: copies, shards, a head each, and two ways of sharding across each other."""

from __future__ import annotations

import checks_fsdp
import torch
from checks_tensor import (
    HOW,
    REDUCES,
    assert_fired,
    tensor_parallel,
)
from decoder import assert_trained_as, batches, decoder, fresh, single, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import coda_inductor


def check_two_copies_of_blocks_that_two_share():
    """HSDP: gradients are summed among those who share, then among the copies."""
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    checks_fsdp.trained(checks_fsdp.sharded(mesh=over))
    assert_fired(checks_fsdp.BLOCK)


def check_tensor_parallelism_inside_of_fsdp():
    fresh()
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(decoder(), over["tensor"])
    for block in model.layers:
        block.compile(**HOW)
    for part in (*model.layers, model):
        fully_shard(part, mesh=over["data"])
    data, group = batches(2), over.get_local_rank("data")
    train(model, [tokens.chunk(2)[group] for tokens in data])
    assert_trained_as(model, single(data))
    assert_fired({"swiglu": 1, "swiglu_backward": 1, "collective": REDUCES})


def check_ranks_agree():
    """On what each has fused: else collectives would not meet."""
    reports = coda_inductor.reports()
    sites = [(s.site, s.role, s.how, s.patterns) for report in reports for s in report.sites]
    theirs: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(theirs, sites)
    assert sites
    assert all(other == sites for other in theirs)
