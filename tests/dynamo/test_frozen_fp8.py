# SPDX-License-Identifier: Apache-2.0
"""Adapters on weights that torchao's ``quantize_`` put into FP8: they get gradients, and these are
those of the weights that the FP8 numbers stand for."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from harness import Harness
from torch import nn
from zoo import float8 as fp8
from zoo.layers import Lora

from coda_inductor import op_by_op
from coda_inductor.compat import InductorError
from coda_inductor.semantic.fp8 import fp8_linear

#: What kernels compute, in plain ops.
ALL = {"gate": "always", "reference": True}
E4M3 = torch.float8_e4m3fn
M, D, HIDDEN = 32, 64, 128


def adapted(count: int = 2, **given) -> nn.Module:
    """Gated MLPs behind norms, all of their layers with adapters of rank 4."""
    model = fp8.Stack(count, **given)
    for layer in model.layers:
        layer.norm.requires_grad_(False)
        for name in ("gate", "up", "down"):
            setattr(layer, name, Lora(getattr(layer, name), 4, 2.0))
    return model


def numbers_of(linear: nn.Linear) -> nn.Parameter:
    """What a weight in FP8 stands for, in float32."""
    return nn.Parameter(linear.weight.qdata.float() * linear.weight.scale, requires_grad=False)


def pair(how: str = "row", **given) -> tuple[nn.Module, nn.Module]:
    """(a model on weights in FP8, the same in float32 on the numbers that these stand for)."""
    torch.manual_seed(0)
    model = adapted(**given).bfloat16()
    wide = copy.deepcopy(model).float()
    fp8.serve(nn.ModuleList(m.base for m in model.modules() if isinstance(m, Lora)), how)
    for ours, theirs in zip(model.modules(), wide.modules(), strict=True):
        if isinstance(ours, Lora):
            theirs.base.weight = numbers_of(ours.base)
    return model, wide


def trained(call, model, x) -> list[torch.Tensor]:
    """The result of ``call``, the gradient of its input and those of the adapters."""
    x = x.detach().clone().requires_grad_()
    y = call(model, x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    upstream[0, :4] = 0  # as behind tokens without a loss
    y.backward(upstream.to(y.dtype))
    weights = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), x.grad, *(p.grad for p in weights)]


def worst(have, want) -> float:
    return max((a.float() - b).norm().item() / b.norm().item()
               for a, b in zip(have, want, strict=True))  # fmt: skip


@pytest.mark.parametrize(("given", "fused"), [
    ({}, False), ({"checkpointed": True}, True), ({"how": "tensor", "bias": True}, True),
], ids=str)  # fmt: skip
def test_adapters_train_on_frozen_fp8(given, fused):
    model, wide = pair(**given)
    harness = Harness(**ALL if fused else {"disable": ["fuse", "idioms"]})
    have = trained(harness.train, model, fp8.batch())
    want = trained(lambda m, x: m(x), wide, fp8.batch().float())
    assert harness.counts["fp8_linear"] == 6
    assert all(g.isfinite().all() and g.any() for g in have)
    # Three bits of mantissa in six products and their gradients.
    assert 1e-3 < worst(have, want) < 0.12
    # The forward pass turns no weight.
    turned = [harness.ops(part)["coda_inductor.fp8_turn.default"] for part in harness.parts]
    assert turned == [0, 6]
    # Where no epilogue has a gradient's maxima, Inductor casts in the kernel that computes them.
    backward = harness.ops(harness.parts[1])["coda_inductor.fp8_cast.default"]
    assert (backward > 0) == fused


@pytest.mark.parametrize(("config", "active"), [
    ({}, ["default", "second"]), ({}, []), ({"use_rslora": True}, ["default"]),
    ({"use_dora": True}, ["default"]),
], ids=str)  # fmt: skip
def test_pefts_own_adapters_train_as_on_the_numbers(config, active):
    peft = pytest.importorskip("peft")
    how = {"target_modules": "all-linear", "init_lora_weights": False, "lora_dropout": 0.0}
    harness, found = Harness(**ALL), []
    for dtype, call in ((torch.bfloat16, harness.train), (torch.float32, lambda m, x: m(x))):
        torch.manual_seed(0)
        model = fp8.serve(fp8.Stack().bfloat16(), "row")
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight = linear.weight if dtype == torch.bfloat16 else numbers_of(linear)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **how, **config))
        if len(active) > 1:
            model.add_adapter("second", peft.LoraConfig(r=8, **how))
            model.base_model.set_adapter(active)
        for weight in (p for p in model.parameters() if p.requires_grad or dtype == torch.float32):
            weight.data = weight.data.to(dtype)
        with nullcontext() if active else model.disable_adapter():
            found.append(trained(call, model, fp8.batch(dtype)))
    assert len(found[0]) == 2 + 6 * len(active) + 3 * ("use_dora" in config)
    assert harness.counts["fp8_linear"] == 3
    assert worst(*found) < 0.12


def layer(x, w, s, bias=None):
    return fp8_linear(x, w, s, bias, False)


def mlp(linear):
    def function(x, g, gs, u, us, a, b, d, ds):  # as Dynamo orders them: by their first use
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = F.silu(linear(n, g, gs)) * (linear(n, u, us) + F.linear(F.linear(n, a), b))
        return x + linear(h, d, ds)

    return function


def test_the_algebra_is_exact_where_nothing_is_rounded():
    """Fused, in float64: results and all gradients, of random numbers in place of FP8's."""
    shapes = [(M, D), (HIDDEN, D), (HIDDEN, 1), (HIDDEN, D), (HIDDEN, 1), (4, D),
              (HIDDEN, 4), (D, HIDDEN), (D, 1)]  # fmt: skip
    half, frozen = torch.bfloat16, (E4M3, torch.float32)
    dtypes = [half, *frozen, *frozen, half, half, *frozen]
    inputs = [torch.rand(s).add(0.5).to(t) for s, t in zip(shapes, dtypes, strict=True)]
    learns = (0, 5, 6)
    for i in learns:
        inputs[i].requires_grad_()
    harness = Harness(**ALL)
    harness.train(mlp(layer), *inputs).sum().backward()
    assert harness.counts["swiglu"] == 1
    have = fp8.exact(harness.graph)
    generator = torch.Generator().manual_seed(3)
    exact = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (*shapes, (M, D))]
    for i in learns:
        exact[i].requires_grad_()
    y = mlp(lambda x, w, s: F.linear(x, w * s))(*exact[:-1])
    want = [y, *torch.autograd.grad(y, [exact[i] for i in learns], exact[-1])]
    for ours, theirs in zip([v for v in have if v is not None], want, strict=True):
        bound = 1e-10 * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=bound)


def test_in_eager_it_is_the_same_function_and_differentiates_once():
    fp8.needs_scaled_mm()
    x, bias = torch.randn(3, 5, D).bfloat16().requires_grad_(), torch.randn(HIDDEN).bfloat16()
    w, s = torch.randn(HIDDEN, D).to(E4M3), torch.rand(HIDDEN, 1) + 0.5
    y = layer(x, w, s, bias.requires_grad_())
    (dx, dbias) = torch.autograd.grad(y.float().square().sum(), (x, bias), create_graph=True)
    want = F.linear(x.detach().float(), w.float() * s, bias.detach().float())
    assert (y - want).norm() < 0.04 * want.norm()
    assert (dx - 2 * want @ (w.float() * s)).norm() < 0.06 * dx.float().norm()
    assert (dbias - 2 * want.sum((0, 1))).norm() < 0.04 * dbias.norm()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


@pytest.mark.parametrize("bounded", [False, True])
def test_what_it_cannot_differentiate_is_torchs_error(bounded):
    """A reason, and no gradient that is None or zero in silence."""
    model, _ = pair(count=1)
    weight, harness = model.layers[0].up.base.weight, Harness(strict=False)
    if bounded:
        weight.act_quant_kwargs.hp_value_ub = 5.0
    else:
        weight.block_size = [128, 64]
    with pytest.raises(Exception, match="derivative for aten::_scaled_mm is not implemented"):
        trained(harness.train, model, fp8.batch())
    assert "fp8-frozen" in [r.code for r in harness.report.refusals]


def test_where_inductor_fails_it_trains_op_by_op(monkeypatch):
    """Without the rewrite there is no gradient, and Inductor's own error would be lost."""

    def never(*_, **__):
        raise InductorError(RuntimeError("no such kernel"), None)

    monkeypatch.setattr(op_by_op, "compile_fx_inner", never)
    model, wide = pair(count=1)
    have = trained(lambda m, x: torch.compile(m, backend="coda")(x), model, fp8.batch())
    assert all(gradient.any() for gradient in have)
    assert worst(have, trained(lambda m, x: m(x), wide, fp8.batch().float())) < 0.12


def test_without_gradients_torchaos_own_chain_stays():
    model, _ = pair(count=1)
    harness = Harness(**ALL)
    harness.run(model, fp8.batch())
    assert harness.counts["fp8_linear"] == 0
    assert harness.counts["fp8_product"] == 3
