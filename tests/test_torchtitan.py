# SPDX-License-Identifier: Apache-2.0
"""torchtitan's head and loss: one graph with the same results, and left alone where that is not
theirs to be. ``zoo.titan`` stands for torchtitan."""

import copy
import dataclasses
import functools
import importlib
import logging
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import as_it_is
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from zoo import titan
from zoo.layers import VOCABULARY

import coda_inductor
from coda_inductor.errors import CodaError

SHAPE, MICROBATCHES = (2, 8), 2


pytestmark = pytest.mark.usefixtures("without_code")


@pytest.fixture
def ours():
    with titan.imported() as (module, specs):
        assert {*specs, "gpt_oss"} == {*module.MODELS}
        yield module, specs


def config(**given):
    return titan.Config(titan.Compile(**given))


def batches():
    torch.manual_seed(1)
    for _ in range(MICROBATCHES):
        labels = torch.randint(VOCABULARY, SHAPE)
        labels[0, :3] = titan.IGNORED
        yield torch.randint(VOCABULARY, SHAPE), labels


def model_of(dtype):
    torch.manual_seed(0)
    return titan.Model(layers=1).to(dtype)


def trained(spec, model, job_config, keep=lambda t: t):
    """Losses and gradients of a step, and the loss in evaluation, as a trainer computes them."""
    dims = titan.Dims()
    loss_fn = spec.build_loss_fn(job_config, parallel_dims=dims)
    model = spec.parallelize_fn(model, dims, job_config)
    count = sum((labels != titan.IGNORED).sum() for _, labels in batches())
    losses = []
    for tokens, labels in batches():
        pred = model(tokens)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = loss_fn(pred, labels) / count
        del pred
        loss.backward()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        losses.append(loss_fn(model(tokens), labels))
    return torch.stack(losses), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 0.3), (torch.bfloat16, 1.0)])
def test_a_step_is_the_same_and_keeps_no_logits_in_float32(ours, dtype, budget):
    saved = []
    model = model_of(dtype)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        losses, gradients = trained(
            ours[1]["llama3"], copy.deepcopy(model), config(), lambda t: saved.append(t) or t
        )
    want_losses, want = trained(titan.TrainSpec(), model, config(enable=False))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(losses, want_losses, rtol=tolerance, atol=0)
    for ours_, theirs in zip(gradients, want, strict=True):
        assert (ours_ - theirs).norm() <= tolerance * theirs.norm()
    assert counters["coda"]["cross_entropy"] == 1
    logits = [t.dtype for t in saved if t.numel() == SHAPE[0] * SHAPE[1] * VOCABULARY]
    assert logits == [dtype] * MICROBATCHES


@pytest.mark.parametrize(("given", "dims", "loss", "why"), [
    ({"enable": False}, {}, None, "--compile.backend=coda"),
    ({"backend": "inductor"}, {}, None, "--compile.backend=coda"),
    ({"components": ("model",)}, {}, None, '"loss" among its components'),
    ({}, {"tp_enabled": True}, None, "pipeline parallelism"),
    ({}, {"pp_enabled": True}, None, "pipeline parallelism"),
    ({}, {}, lambda *_, **__: None, "not torchtitan's cross entropy"),
])  # fmt: skip
def test_what_is_left_alone_is_said_once(ours, caplog, given, dims, loss, why):
    module, _ = ours
    spec = titan.TrainSpec(build_loss_fn=loss) if loss else titan.TrainSpec()
    spec, model = module.with_head_and_loss(spec), model_of(torch.float32)
    with caplog.at_level(logging.INFO, "coda_inductor"):
        loss_fn = spec.build_loss_fn(config(**given), parallel_dims=titan.Dims(**dims))
        model = spec.parallelize_fn(model, titan.Dims(**dims), config(**given))
    (said,) = caplog.messages
    assert why in said
    assert not isinstance(loss_fn, module.HeadAndLoss)
    assert model(next(batches())[0]).shape == (*SHAPE, VOCABULARY)


def test_a_model_that_changes_its_logits_is_an_error_and_no_wrong_loss(ours):
    class Scaled(titan.Model):
        def forward(self, tokens):
            return super().forward(tokens) * 2

    with pytest.raises(CodaError, match="does not return its head's result"):
        trained(ours[1]["llama3"], Scaled(layers=1), config())


@pytest.fixture
def overrides(monkeypatch):
    """The example for torchtitan 0.3, which has its names from here."""

    class ChunkedLossWrapper:
        """As much of it as the example needs."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config:
            loss_fn: object

        def __init__(self, config, *, compile_config=None):
            self.loss_fn = config.loss_fn.build(compile_config=compile_config)

        def set_lm_head(self, lm_head):
            self.lm_head = lm_head

        def __call__(self, pred, labels, tokens=None, **given):
            return self.loss_fn(self.lm_head(pred), labels)[0] / tokens, {"chunks": True}

    names = {
        "torchtitan.components.loss": {"ChunkedLossWrapper": ChunkedLossWrapper},
        "torchtitan.config.override": {
            "override": lambda **_: lambda factory: factory,
            "derive": lambda source, target: target(loss_fn=source.loss_fn),
        },
    }
    folders = {"torchtitan": {}, "torchtitan.components": {}, "torchtitan.config": {}}
    for name, content in (folders | names).items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(content)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    light = functools.partial(compile_fx.compile_fx, inner_compile=as_it_is)
    monkeypatch.setattr(compile_fx, "compile_fx", light)
    with coda_inductor.enabled():  # the example enables; leaving this disables again
        yield importlib.import_module("titan_overrides")
    del sys.modules["titan_overrides"]


class Built:
    def build(self, *, compile_config):
        return lambda pred, labels: (titan.cross_entropy_loss(pred, labels), {})


def test_the_example_for_newer_versions(overrides):
    model = model_of(torch.float32)
    config = overrides.head_and_loss(overrides.ChunkedLossWrapper.Config(loss_fn=Built()))
    loss_fn, want = overrides.HeadAndLoss(config), titan.cross_entropy_loss
    loss_fn.set_lm_head(model.output)
    tokens, labels = next(batches())
    found = []
    plain = lambda hidden, labels, count: (want(model.output(hidden), labels) / count, {})  # noqa: E731
    for of in (loss_fn, plain):
        model.zero_grad()
        loss, metrics = of(model.trunk(tokens), labels, 7)
        loss.backward()
        found.append((loss, [p.grad for p in model.parameters()]))
        assert not metrics
    torch.testing.assert_close(*found)
    assert Counter(counters["coda"])["cross_entropy"] == 1
    with torch.no_grad():
        loss, metrics = loss_fn(model.trunk(tokens), labels, 7)
    torch.testing.assert_close(loss, found[0][0])
    assert metrics == {"chunks": True}
