# SPDX-License-Identifier: Apache-2.0
"""Each way of sharding once with Inductor's own code, which re-uses memory around collectives."""

from __future__ import annotations

import warnings

import torch
from checks_tensor import tensor_parallel
from decoder import OPTIONS, Decoder, assert_trained_as, batches, decoder, mine, single, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

OP_BY_OP = False
HOW = {"backend": "coda", "options": OPTIONS}


def block() -> Decoder:
    """A decoder of one block, which is all of it that is compiled."""
    model = decoder(1)
    model.layers[0].compile(**HOW)
    return model


def check_replicas():
    model, data = block(), batches(2, 2)
    with torch._dynamo.config.patch(optimize_ddp=False):
        train(model, list(map(mine, data)), DistributedDataParallel(model))
    assert_trained_as(model, single(data, 1))


def check_fully_sharded_parameters():
    """A block returns no view: FSDP2 warns of those, for what writes to one drops its hooks."""
    model, data = block(), batches(2, 2)
    for part in (*model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, list(map(mine, data)))
    assert not [w for w in said if "returned a view" in str(w.message)]
    assert_trained_as(model, single(data, 1))


def check_tensor_parallelism():
    model, data = block(), batches(1, 2)
    train(tensor_parallel(model, init_device_mesh("cpu", (2,))), data)
    assert_trained_as(model, single(data, 1))
