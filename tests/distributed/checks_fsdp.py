# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (``fully_shard``): parameters are gathered block by block, and move at every step. Pipeline
parallelism: a stage's input and its gradient come from other ranks."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist
from decoder import (
    OPTIONS,
    assert_trained_as,
    batches,
    compile_head_and_loss,
    decoder,
    fired,
    fresh,
    full,
    loss_of,
    mine,
    single,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

LAYERS = 2
HOW = {"backend": "coda", "options": OPTIONS}
#: One graph serves all blocks. Its first norm reads an input.
BLOCK = {"rms_norm": 1, "rms_norm_backward": 1, "swiglu": 1, "swiglu_backward": 1}


def sharded(**how):
    """A model that is sharded block by block, blocks compiled."""
    fresh()
    model = decoder(LAYERS)
    for block in model.layers:
        block.compile(**HOW)
    return shard(model, **how)


def shard(model, mesh=None, **how):
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, **how)
    return model


def trained(model, call=None) -> None:
    data = batches(torch.distributed.get_world_size())
    train(model, list(map(mine, data)), call)
    assert_trained_as(model, single(data, LAYERS))


def assert_fired(want) -> None:
    assert {name: fired().get(name, 0) for name in want} == want, fired()


def check_the_whole_model():
    """Torch breaks the graph at each block's hooks."""
    fresh()
    model = shard(decoder(LAYERS))
    trained(model, torch.compile(model, **HOW))
    assert_fired(BLOCK)


def check_blocks_and_a_graph_of_head_and_loss():
    model = sharded()
    compile_head_and_loss(model, **HOW)
    data = batches(2)
    train(model, list(map(mine, data)), loss=lambda found, _: found)
    assert_trained_as(model, single(data, LAYERS))
    assert_fired(BLOCK | {"cross_entropy": 1})


def check_steps_of_clipped_gradients_that_were_added_up():
    """Parameters stay gathered between two backward passes, and lie on the CPU behind them.
    HSDP: gradients are summed among those who share, then among the copies."""
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    offload = CPUOffloadPolicy(pin_memory=False)
    how = {"mesh": copies, "reshard_after_forward": False, "offload_policy": offload}
    model, plain, data = sharded(**how), decoder(LAYERS), batches(2, 4)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    for number, tokens in enumerate(data):
        model.set_requires_gradient_sync(last := bool(number % 2))
        loss_of(model(mine(tokens)), mine(tokens)).backward()
        loss_of(plain(tokens), tokens).backward()
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            if last:
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert_trained_as(model, plain)
    assert_fired(BLOCK)


def products():
    """A policy of selective checkpointing that keeps every product."""
    keep = {torch.ops.aten.mm.default}

    def policy(_context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def check_checkpointed_blocks_as_torchtitan_wraps_them():
    """The wrapper is compiled, as one graph, and sharded. A policy is a limit of memory and keeps
    nothing from being rewritten."""
    for how in ({}, {"context_fn": products}):
        fresh()
        model = decoder(LAYERS)
        for number, block in enumerate([*model.layers]):
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **how)
            wrapped.compile(fullgraph=True, **HOW)
            model.layers[number] = wrapped
        trained(shard(model))
        assert_fired(BLOCK)


def check_bfloat16_beside_float32_master_weights():
    """As exact as eager under the same wrapping, beside float64. Nothing keeps the model then."""
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    ours = sharded(**how).float()
    theirs = shard(decoder(LAYERS).float(), **how)
    data = batches(2)
    train(ours, list(map(mine, data)))
    train(theirs, list(map(mine, data)))
    exact = single(data, LAYERS)
    errors = [distance(model, exact) for model in (ours, theirs)]
    assert errors[0] <= 1.2 * errors[1], errors
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_fired(BLOCK)
    kept = [weakref.ref(x) for x in (ours, ours.layers[0], ours.head.weight)]
    del ours
    gc.collect()
    assert not any(reference() for reference in kept)


def distance(model, exact) -> float:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return sum((full(p.detach()).double() - q).norm().item() ** 2 for p, q in pairs) ** 0.5


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
