# SPDX-License-Identifier: Apache-2.0
"""peft's LoRA on weights that torchao quantized: each way that peft computes it trains as on the
numbers that the weights stand for, and peft's own functions do what they do without us."""

import pytest
import torch
from harness import Harness
from torch import nn
from zoo import float8 as fp8
from zoo.layers import Gated

peft = pytest.importorskip("peft")
pytest.importorskip("torchao.quantization")

D, HIDDEN = 64, 128


def adapted(frozen: bool, dtype: torch.dtype, **config) -> nn.Module:
    """Two gated layers with an adapter; ``frozen``: on FP8, else on its numbers in ``dtype``."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(D, HIDDEN), Gated(D, HIDDEN)).bfloat16()
    fp8.serve(model, "row")
    if not frozen:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                exact = module.weight.qdata.float() * module.weight.scale
                module.weight = nn.Parameter(exact.to(dtype))
        model = model.to(dtype)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, of_rank(4, **config))
    return in_dtype(model, dtype)


def of_rank(r: int, **config):
    return peft.LoraConfig(
        r=r, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0, **config
    )


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(dtype)
    return model


def gradients(call, model, x) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = call(model, x)
    y.float().square().sum().backward()
    learned = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"result": y.detach(), "input": x.grad, **learned}


def agree(have, want) -> None:
    assert have.keys() == want.keys()
    for name, theirs in want.items():
        if name == "input" or theirs is not None:  # an adapter that is not active has none
            assert (have[name].float() - theirs).norm() < 0.08 * theirs.norm(), name


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_gradients_are_those_of_the_numbers(config):
    harness = Harness(gate="always", reference=True)
    have = gradients(harness.train, adapted(True, torch.bfloat16, **config), fp8.batch())
    want = gradients(call, adapted(False, torch.float32, **config), fp8.batch().float())
    assert harness.counts["fp8_linear"] == 6
    agree(have, want)


def call(model, x):
    return model(x)


def two(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    model.add_adapter("second", of_rank(8))
    model.base_model.set_adapter(["default", "second"])
    return in_dtype(model, dtype)


def test_several_adapters_and_none():
    harness = Harness(gate="always", reference=True)
    model = two(adapted(True, torch.bfloat16), torch.bfloat16)
    wide = two(adapted(False, torch.float32), torch.float32)
    agree(gradients(harness.train, model, fp8.batch()), gradients(call, wide, fp8.batch().float()))
    model.zero_grad()
    wide.zero_grad()
    with model.disable_adapter(), wide.disable_adapter():
        have = gradients(harness.train, model, fp8.batch())
        want = gradients(call, wide, fp8.batch().float())
    assert harness.counts["fp8_linear"] == 6
    agree(have, want)


def test_saving_and_merging_are_pefts():
    model = adapted(True, torch.bfloat16)
    before = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
    gradients(Harness(reference=True).train, model, fp8.batch())
    after = peft.get_peft_model_state_dict(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(ValueError, match="get_apply_tensor_subclass"):
        model.merge_and_unload()  # without us too: the model was not loaded by transformers
