# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (``fully_shard``): parameters are gathered block by block, and move at every step."""

from __future__ import annotations

import torch
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

LAYERS = 2
HOW = {"backend": "coda", "options": OPTIONS}
#: One graph serves all blocks. Its first norm reads an input.
BLOCK = {"rms_norm": 1, "rms_norm_backward": 1, "swiglu": 1, "swiglu_backward": 1}


def sharded(*, reshard: bool = True, **how):
    """A model that is sharded block by block, blocks compiled."""
    fresh()
    model = decoder(LAYERS)
    for block in model.layers:
        block.compile(**HOW)
    return shard(model, reshard, **how)


def shard(model, reshard: bool, mesh=None, **how):
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, **how)
    return model


def trained(model, call=None) -> None:
    """Steps like one rank's."""
    data = batches(torch.distributed.get_world_size())
    train(model, list(map(mine, data)), call)
    assert_trained_as(model, single(data, LAYERS))


def assert_fired(want) -> None:
    assert {name: fired().get(name, 0) for name in want} == want, fired()


def check_blocks_that_are_sharded_again_after_forward():
    trained(sharded(reshard=True))
    assert_fired(BLOCK)


def check_the_whole_model():
    """Torch breaks the graph at each block's hooks."""
    fresh()
    model = shard(decoder(LAYERS), True)
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
    """Parameters stay gathered between two backward passes, and lie on the CPU behind them."""
    how = {"reshard": False, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
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
    """The wrapper is compiled, as one graph, and sharded; or it is around the compiled block, which
    runs its forward graph twice."""
    for inside, how in ((True, {}), (True, {"context_fn": products}), (False, {})):
        fresh()
        model = decoder(LAYERS)
        for number, block in enumerate([*model.layers]):
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False, **how)
            (wrapped if inside else block).compile(fullgraph=True, **HOW)
            model.layers[number] = wrapped
        trained(shard(model, True))
        assert_fired({"swiglu": 1, "rms_norm": 0} if how else BLOCK)


def check_bfloat16_beside_float32_master_weights():
    """As exact as eager under the same wrapping, beside float64."""
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    ours = sharded(**how).float()
    theirs = shard(decoder(LAYERS).float(), True, **how)
    data = batches(2)
    for model in (ours, theirs):
        train(model, list(map(mine, data)))
    exact = single(data, LAYERS)
    errors = [distance(model, exact) for model in (ours, theirs)]
    assert errors[0] <= 1.2 * errors[1], errors
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_fired(BLOCK)


def distance(model, exact) -> float:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return sum((full(p.detach()).double() - q).norm().item() ** 2 for p, q in pairs) ** 0.5
