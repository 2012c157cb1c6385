# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: each way to compile, what it keeps of the fusions, and what it leaves."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref

import torch
from decoder import (
    OPTIONS,
    assert_trained_as,
    batches,
    decoder,
    fired,
    fresh,
    loss_of,
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


@contextlib.contextmanager
def heard():
    """What coda_inductor warns of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("coda_inductor")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def counted(names) -> dict[str, int]:
    return {name: count for name, count in fired().items() if name in names}


def trained(model, step) -> None:
    """Steps of the two ranks, which must be those of one rank with all data."""
    data = batches(2)
    train(model, list(map(mine, data)), step)
    assert_trained_as(model, single(data, LAYERS, WIDTH))


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


def check_a_graph_that_ddp_cut_is_named_once_with_the_remedy():
    fresh()
    notice.told.discard("ddp")
    model = decoder(LAYERS, WIDTH)
    with heard() as said:
        trained(model, torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), **HOW))
    (warning,) = said
    assert "DistributedDataParallel cut" in warning
    assert "optimize_ddp = False" in warning
    assert "block.compile(backend='coda')" in warning
    assert len(coda_inductor.reports()) > 1
    assert fired().get("rms_norm", 0) < WHOLE["rms_norm"]


def check_blocks_are_cut_too_where_one_is_larger_than_a_bucket():
    fresh()
    notice.told.discard("ddp")
    model, before = decoder(LAYERS, WIDTH), len(coda_inductor.reports())
    blocks(model)
    with heard() as said:
        trained(model, DistributedDataParallel(model, bucket_cap_mb=1))
    assert len(said) == 1
    assert len(coda_inductor.reports()) > before + 1


def check_the_recommended_way_fuses_what_one_rank_does():
    notice.told.discard("ddp")
    for compile_, want in ((blocks, BLOCKS), (whole, WHOLE)):
        want_all = alone(compile_)
        fresh()
        model = decoder(LAYERS, WIDTH)
        compile_(model)
        with torch._dynamo.config.patch(optimize_ddp=False), heard() as said:
            trained(model, DistributedDataParallel(model, bucket_cap_mb=1))
        assert not said
        assert counted(want) == want, fired()
        assert fired() == want_all, (fired(), want_all)


def check_compiled_around_ddp_without_the_cut():
    fresh()
    model = decoder(LAYERS, WIDTH)
    with torch._dynamo.config.patch(optimize_ddp=False):
        trained(model, torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), **HOW))
    assert counted(WHOLE) == WHOLE, fired()


def check_gradients_add_up_without_synchronization():
    fresh()
    model = decoder(LAYERS, WIDTH)
    blocks(model)
    data = batches(2, 2)
    with torch._dynamo.config.patch(optimize_ddp=False):
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        with ddp.no_sync():
            loss_of(ddp(mine(data[0])), mine(data[0])).backward()
        loss_of(ddp(mine(data[1])), mine(data[1])).backward()
    plain = decoder(LAYERS, WIDTH)
    for tokens in data:
        loss_of(plain(tokens), tokens).backward()
    for have, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(have.grad, want.grad, rtol=1e-9, atol=1e-12)


def check_nothing_keeps_the_model_or_what_ddp_has_made_of_it():
    """What is kept beyond its group ends late, or not at all."""
    for cut in (True, False):
        fresh()
        model = decoder(LAYERS, WIDTH)
        with torch._dynamo.config.patch(optimize_ddp=cut):
            ddp = DistributedDataParallel(model, bucket_cap_mb=1)
            train(model, [mine(t) for t in batches(2, 1)], torch.compile(ddp, **HOW))
        kept = [weakref.ref(x) for x in (model, ddp, model.head.weight, ddp.reducer)]
        del model, ddp
        gc.collect()
        assert not any(reference() for reference in kept)
