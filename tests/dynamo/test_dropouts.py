# SPDX-License-Identifier: Apache-2.0
"""Adapters behind dropout, written as peft writes them, draw their masks in one op for each input;
what is computed, and each gradient, is that of a float64 model with the same masks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import TOLERANCE, assert_same
from harness import Harness
from passes import codes
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo import dropouts
from coda_inductor.matching import bodies
from coda_inductor.semantic.dropout import FORWARD, keep_mask, scale

B, T, D, P = 2, 8, 64, 0.25


@pytest.fixture(autouse=True)
def few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(dropouts, "LEAST", 1)


class Lora(nn.Module):
    """As peft's ``lora.Linear``; ``names`` are its active adapters."""

    def __init__(self, rank=8, names=("one",), p=P, **how):
        super().__init__()
        self.base = nn.Linear(D, D, bias=False).requires_grad_(False)
        self.a, self.b, self.dropout = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        for name in names:
            self.a[name] = nn.Linear(D, rank, bias=how.get("bias", False))
            self.b[name] = nn.Linear(rank, D, bias=False)
            self.dropout[name] = nn.Dropout(p, inplace=how.get("inplace", False))
        self.names, self.dora = names, how.get("dora")

    def forward(self, x):
        result = self.base(x)
        dtype = result.dtype
        for name in self.names:
            a, dropout = self.a[name], self.dropout[name]
            x = x.to(a.weight.dtype)
            x = dropout(x) if self.dora else x
            low = a(x if self.dora else dropout(x))
            more = F.linear(x, self.base.weight) if self.dora else 0
            result = result + self.b[name](low) * 2.0 + more
        return result.to(dtype)


class Block(nn.Module):
    """Two layers that share an input, and one that has its own."""

    def __init__(self, **how):
        super().__init__()
        self.q, self.k, self.o = (Lora(**how) for _ in range(3))
        self.checkpoint = self.autocast = False

    def inner(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return x + self.o(self.q(x).sin() * self.k(x))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpoint else self.inner(x)


class Given(nn.Module):
    """A dropout whose mask is given."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return (x * self.mask.view(x.shape)).to(x.dtype) * scale(P)


def wide(model: nn.Module, rows: int) -> nn.Module:
    """``model`` in float64, in which each dropout has the mask that the next step draws."""
    state = torch.get_rng_state()
    seed = torch.randint(0, 2**63 - 1, (1,))
    torch.set_rng_state(state)
    model = copy.deepcopy(model).double()
    for parameter in model.parameters():
        parameter.grad = None
    number = 0
    for layer in (model.q, model.k, model.o):
        for name in layer.names:
            layer.dropout[name] = Given(keep_mask(seed, number, rows, D, P))
            number += 1
    model.checkpoint = model.autocast = False
    return model


def step(call, model, x):
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = call(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def harness_of(model, x, dynamic=None, **options):
    """Compiled and called once, and the compiled function."""
    harness = Harness(reference=True, **options)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=harness, dynamic=dynamic)
    step(compiled, model, x)
    return harness, compiled


def match_ops(harness):
    return [n for body in bodies(harness.raised) for n in body.graph.nodes if n.target is FORWARD]


@pytest.mark.parametrize("way", [
    "adapters in float32", "autocast", "checkpoint", "any size", "five adapters",
])  # fmt: skip
def test_a_step_is_that_of_the_same_masks(way):
    names, dtype, dynamic = ("one",), torch.float64, way == "any size" or None
    if way == "five adapters":
        names = tuple("abcde")
    model = Block(names=names, rank=4)
    model.checkpoint, model.autocast = way == "checkpoint", way == "autocast"
    if way == "adapters in float32":
        dtype = torch.bfloat16
        for layer in (model.q, model.k, model.o):
            layer.base.to(dtype)
    elif model.autocast:
        dtype = torch.float32
    else:
        model.double()
    x = torch.randn(B, T, D).to(dtype)
    harness, compiled = harness_of(model, x, dynamic)
    assert counters["coda"]["adapter_dropout"] == 3 * len(names)
    assert len(match_ops(harness)) == sum(-(-n * len(names) // dropouts.MOST) for n in (1, 2))
    tolerance = TOLERANCE[torch.bfloat16 if model.autocast else dtype]
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        reference = wide(model, B * T)
        want = step(reference, reference, x.double())
        found.append(step(compiled, model, x))
        assert_same([t.double() for t in found[-1]], want, 2 * tolerance)
    assert all(map(torch.equal, *found))
    assert not torch.equal(step(compiled, model, x)[0], found[0][0])  # the next one has others


def written_between(x, a):
    y = F.dropout(x, P)
    x.mul_(2)
    return F.linear(y, a) * x.mean()


REFUSED = {
    "DoRA": (Lora(dora=True), {}, "dropout-shared"),
    "a bias": (Lora(bias=True), {}, "dropout-form"),
    "in place": (Lora(inplace=True), {}, "dropout-form"),
    "all dropped": (Lora(p=1.0), {}, "dropout-form"),
    "a change between": (written_between, {}, "mutation"),
    "a CPU": (Lora(), {"reference": False}, "no-kernels-on-device"),
    "few rows": (Lora(), {}, "too-small"),
    "masks of eager": (Lora(), {}, "dropout-eager"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_stays_as_it_is(why, monkeypatch):
    function, options, code = REFUSED[why]
    monkeypatch.setattr(dropouts, "LEAST", B * T + (why == "few rows"))
    harness = Harness(**{"reference": True, **options})
    args = (torch.randn(8, D),) if function is written_between else ()
    with torch._inductor.config.patch(fallback_random=why == "masks of eager"):
        harness.train(function, torch.randn(B * T, D), *args)
    assert not match_ops(harness)
    assert code in codes(harness)


def test_the_backward_pass_of_inductor_draws_the_same_masks():
    """What is linear in x and in each weight is the product of each with its gradient. In the
    checkpoint, the gradient of B needs what the backward pass computes again."""
    layer = Lora(names=("one",)).double()
    layer.base.weight.zero_()
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    options = {"reference": True, "strict": True}
    compiled = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False), backend="coda", options=options
    )
    found = []
    for _ in range(2):
        found.append(compiled(x).square().sum())
        layer.zero_grad()
        x.grad = None
        found[-1].backward()
        for each in (x, layer.a["one"].weight, layer.b["one"].weight):
            torch.testing.assert_close((each * each.grad).sum(), 2 * found[-1].detach())
    assert found[0] != found[1]
    assert counters["coda"]["adapter_dropout"] == 1


def test_peft_itself():
    peft = pytest.importorskip("peft")
    inner = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    config = peft.LoraConfig(r=4, lora_dropout=P, target_modules=["0", "2"], use_rslora=True)
    model = peft.get_peft_model(inner, config)
    harness, compiled = harness_of(model, torch.randn(B, T, D))
    assert len(match_ops(harness)) == 2
    x = torch.ones(B, D)
    with model.disable_adapter():
        assert_same(compiled(x), inner(x))
    model.eval()
    assert_same(compiled(x), model(x))
    assert not match_ops(harness)
