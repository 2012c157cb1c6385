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
    """A gated layer with an adapter; ``frozen``: on FP8, else on its numbers in ``dtype``."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(D, HIDDEN)).bfloat16()
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
    how = {"target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.0}
    return peft.LoraConfig(r=r, **how, **config)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(dtype)
    return model


def gradients(model, x, call=nn.Module.__call__) -> dict[str, torch.Tensor]:
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
    have = gradients(adapted(True, torch.bfloat16, **config), fp8.batch(), harness.train)
    want = gradients(adapted(False, torch.float32, **config), fp8.batch().float())
    assert harness.counts["fp8_linear"] == 3
    agree(have, want)


def two(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    model.add_adapter("second", of_rank(8))
    model.base_model.set_adapter(["default", "second"])
    return in_dtype(model, dtype)


def test_several_adapters_and_none():
    harness = Harness(gate="always", reference=True)
    model = two(adapted(True, torch.bfloat16), torch.bfloat16)
    wide = two(adapted(False, torch.float32), torch.float32)
    with model.disable_adapter(), wide.disable_adapter():
        none = gradients(model, fp8.batch(), harness.train)
        agree(none, gradients(wide, fp8.batch().float()))
    model.zero_grad()
    wide.zero_grad()
    before = {key: t.clone() for key, t in peft.get_peft_model_state_dict(model).items()}
    have = gradients(model, fp8.batch(), harness.train)
    agree(have, gradients(wide, fp8.batch().float()))
    after = peft.get_peft_model_state_dict(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
