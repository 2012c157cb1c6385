# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: each way to compile, what it keeps of the fusions, what it leaves."""

from __future__ import annotations

import functools
import gc
import weakref

import torch
from decoder import (
    OPTIONS,
    assert_trained_as,
    batches,
    compile_head_and_loss,
    decoder,
    fired,
    fresh,
    heard,
    mine,
    single,
    train,
)
from torch.nn.parallel import DistributedDataParallel

import coda_inductor
from coda_inductor.runtime import notice

#: A block has more parameters than a bucket of 1 MiB holds, so that torch cuts within blocks.
LAYERS, WIDTH = 2, 128
HOW = {"backend": "coda", "options": OPTIONS}
#: One graph serves all blocks. Its first norm reads an input.
BLOCKS = {"rms_norm": 1, "rms_norm_backward": 1, "swiglu": 1, "swiglu_backward": 1}
#: In one graph of everything only the first norm, behind the embedding, is left.
WHOLE = {name: count * LAYERS for name, count in BLOCKS.items()}
WHOLE |= {"rms_norm": 2 * LAYERS, "rms_norm_backward": 2 * LAYERS}


def trained(stepping) -> None:
    """Steps of the two ranks, which must be those of one rank with all data; then nothing keeps the
    model or what DDP has made of it, which would end later than its group, or not at all.
    ``stepping`` makes of a model what is called."""
    fresh()
    model, data = decoder(LAYERS, WIDTH), batches(2, 2)
    step = stepping(model)
    train(model, list(map(mine, data)), step)
    assert_trained_as(model, single(data, LAYERS, WIDTH))
    kept = [weakref.ref(x) for x in (model, step, model.head.weight)]
    del model, step
    gc.collect()
    assert not any(reference() for reference in kept)


def buckets(model) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=1)


def around(model):
    return torch.compile(buckets(model), **HOW)


def blocks_first(model):
    blocks(model)
    return buckets(model)


def whole_first(model):
    whole(model)
    return buckets(model)


@functools.cache
def alone(compile_) -> dict[str, int]:
    """What fires where the same is compiled and trained on one rank."""
    fresh()
    model = decoder(LAYERS, WIDTH)
    compile_(model)
    train(model, batches(1, 1))
    return fired()


def blocks(model) -> None:
    for block in model.layers:
        block.compile(**HOW)


def whole(model) -> None:
    model.compile(**HOW)


def check_what_ddp_cut_is_named_once_with_the_remedy():
    """The whole, or blocks where one is larger than a bucket."""
    for stepping in (around, blocks_first):
        notice.told.discard("ddp")
        before = len(coda_inductor.reports())
        with heard() as said:
            trained(stepping)
        (warning,) = said
        assert "DistributedDataParallel cut" in warning
        assert "optimize_ddp = False" in warning
        assert "block.compile(backend='coda')" in warning
        assert len(coda_inductor.reports()) > before + 1
        assert fired().get("rms_norm", 0) < WHOLE["rms_norm"]


def check_the_recommended_ways_fuse_what_one_rank_does():
    notice.told.discard("ddp")
    ways = ((blocks_first, blocks, BLOCKS), (whole_first, whole, WHOLE), (around, whole, WHOLE))
    for stepping, same, want in ways:
        with torch._dynamo.config.patch(optimize_ddp=False), heard() as said:
            trained(stepping)
        assert not said
        have = fired()
        assert {name: have.get(name, 0) for name in want} == want, have
        assert have == alone(same)


def check_blocks_and_a_graph_of_head_and_loss():
    fresh()
    model, data = decoder(LAYERS, WIDTH), batches(2, 2)
    blocks(model)
    compile_head_and_loss(model, **HOW)
    with torch._dynamo.config.patch(optimize_ddp=False):
        train(model, list(map(mine, data)), buckets(model), loss=lambda found, _: found)
    assert_trained_as(model, single(data, LAYERS, WIDTH))
    have = fired()
    want = BLOCKS | {"cross_entropy": 1}
    assert {name: have.get(name, 0) for name in want} == want, have
