# SPDX-License-Identifier: Apache-2.0
"""Checks on two ranks of transformers' Trainer with our callback, part of ``cases``."""

import pytest
import torch
import torch.distributed as dist
import training as on
from torch._dynamo import config
from transformers import TrainerCallback
from zoo.trained import LAYERS, llama, trainer

from coda_inductor import CodaError, log
from coda_inductor.transformers import CodaCallback, compare_gradients


def ddp_in_a_trainer_trains_as_without_the_callback():
    on.fresh()
    cuts, plain, ours, watch = [], llama(), llama(), TrainerCallback()
    watch.on_step_end = lambda *_, **__: cuts.append(config.optimize_ddp)
    trainer(plain).train()
    trainer(ours, [CodaCallback(options=on.OPTIONS), watch]).train()
    on.assert_fired({"rms_norm": 2 * LAYERS, "rms_norm_backward": 2 * LAYERS})
    on.assert_trained_as(ours, plain, 1e-4)
    assert ({*cuts}, config.optimize_ddp) == ({False}, True)


def a_gradient_that_is_not_reduced_stops_all_ranks():
    def change(*_, model, **__):
        weight = model.model.norm.weight
        weight.grad = weight.grad * (1 + dist.get_rank())

    (local := TrainerCallback()).on_pre_optimizer_step = change
    with pytest.raises(CodaError, match=r"of 1 of \d+ parameters, first model.norm.weight"):
        trainer(llama(), [local, CodaCallback(options=on.OPTIONS)]).train()
    model = torch.nn.Linear(4, 4)
    model.weight.grad = torch.full((4, 4), float("nan"))  # as where a scaled loss overflows
    log.forget_warnings()
    with on.heard() as said:
        compare_gradients(model)
    assert ["1 trained parameters, first bias, have no grad" in text for text in said] == [True]
    model.bias.grad = torch.ones(4) if dist.get_rank() else None
    with pytest.raises(CodaError, match="of 1 of 2 parameters, first bias"):
        compare_gradients(model)


def what_fsdp2_shards_is_compiled_by_the_callback():
    on.fresh()
    model, callback = on.shard(on.decoder()), CodaCallback(options=on.OPTIONS)
    callback.on_train_begin(trainer(llama()).args, None, None, model=model)
    compiled = [bool(part._compiled_call_impl) for part in (model, *model.layers)]
    assert compiled == [False, True, True]
    assert not callback.unchecked
    on.train(model, [on.mine(tokens) for tokens in on.batches(2)])
    on.assert_trained_as(model, on.single())
    on.assert_fired({"swiglu_backward": 1})


CHECKS = {check.__name__: check for check in (
    ddp_in_a_trainer_trains_as_without_the_callback, a_gradient_that_is_not_reduced_stops_all_ranks,
    what_fsdp2_shards_is_compiled_by_the_callback,
)}  # fmt: skip
