# SPDX-License-Identifier: Apache-2.0
"""Weights that are updated within the backward pass: bit for bit as by ``step()`` after it, and
what is in the way of that is refused, waits for ``step()``, or raises."""

import copy
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from zoo.layers import VOCABULARY, Decoder

import coda_inductor
from coda_inductor import optim
from coda_inductor.errors import OptionError
from coda_inductor.log import forget_warnings
from coda_inductor.optim import Updated, in_backward


def adamw(model, **more):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True, **more)


class Tied(nn.Module):
    """Embedding and head are one weight; a block runs twice."""

    def __init__(self):
        super().__init__()
        self.e, self.n = nn.Embedding(24, 16), nn.RMSNorm(16)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids):
        x = self.e(ids)
        for _ in range(2):
            x = x + self.b(F.silu(self.a(self.n(x))))
        return F.cross_entropy((x @ self.e.weight.t()).flatten(0, 1), ids.flatten())


class Language(Decoder):
    def __init__(self):
        super().__init__(1)

    def forward(self, ids):
        return F.cross_entropy(super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Wide(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.sin(layer(x))
        return x.square().mean()


def ids(most=24):
    return torch.randint(most, (2, 8))


def kinds(model):
    return {type(p.grad) for p in model.parameters()}


def pair(make=Tied, dtype=torch.float32, optimizer=adamw, compiled=True, **how):
    """Two equal models, compiled, with their optimizers: the first one's runs within backward."""
    models = [make().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [optimizer(model) for model in models]
    in_backward(optimizers[0], **how)
    for model in models if compiled else ():
        model.compile(backend="coda")
    return models, optimizers


def all_updated(model, _number):
    assert kinds(model) == {Updated}


def turn(models, optimizers, *batches, look=lambda *_: None, times=1):
    """Steps of both; ``look(model, number)`` at the first one behind each backward pass."""
    for model, optimizer in [*zip(models, optimizers, strict=True)] * times:
        for number, batch in enumerate(batches):
            model(batch).backward()
            if model is models[0]:
                look(model, number)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(models):
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.fixture(autouse=True)
def _own_graphs():
    forget_warnings()
    yield
    optim._OWNERS.clear()


@pytest.mark.parametrize(("make", "dtype"), [(Tied, torch.bfloat16), (Language, torch.float32)])
def test_as_step_after_it_with_groups_and_a_schedule(make, dtype, without_code):
    def grouped(model):
        one, *rest = model.parameters()
        groups = [{"params": [one], "lr": 3e-3, "weight_decay": 0.0}, {"params": rest}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)

    models, optimizers = pair(make, dtype, grouped)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)) for o in optimizers]
    batch = ids(VOCABULARY if make is Language else 24)
    for _ in range(2):
        turn(models, optimizers, batch, look=all_updated)
        for schedule in schedules:
            schedule.step()
    assert counters["stats"]["unique_graphs"] == 1  # of both, and for all learning rates
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    optimizers[0].load_state_dict(copy.deepcopy(states[1]))  # and goes on from the other's
    turn(models, optimizers, batch)
    assert_equal(models)


def test_in_the_code_each_update_follows_the_last_reader(monkeypatch):
    """By Inductor's code: a weight is not read behind its update, and a gradient is freed there."""
    monkeypatch.setattr("coda_inductor.memory.updates._SMALL", 0)
    models, optimizers = pair(Language)
    batch = ids(VOCABULARY)
    _, codes = run_and_get_code(lambda: models[0](batch).backward())
    code = next(c for c in codes if "give_gradient_" in c)
    lines = code[code.index("def call") : code.index("return (")].splitlines()
    updates = {
        re.findall(r"primals_\d+", line)[0]: i
        for i, line in enumerate(lines)
        if "give_gradient_.default(" in line
    }
    assert len(updates) == len(list(models[0].parameters()))
    for weight, i in updates.items():
        later = [line.strip() for line in lines[i + 1 :] if re.search(rf"\b{weight}\b", line)]
        assert later in ([], [f"del {weight}"])
    between = lines[min(updates.values()) : max(updates.values())]
    assert sum("mm(" in line for line in between) > 4  # they are not all at the end
    models[1](batch).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_equal(models)


def test_few_gradients_are_alive(without_code, monkeypatch):
    monkeypatch.setattr("coda_inductor.memory.updates._SMALL", 0)
    alive, most, step = weakref.WeakSet(), [], optim._step

    def count(optimizer, group, weight, gradient):
        alive.add(gradient)
        most.append(len(alive))
        step(optimizer, group, weight, gradient)

    monkeypatch.setattr(optim, "_step", count)
    (model, _), _optimizers = pair(lambda: Wide(8))
    model(torch.randn(4, 64)).backward()
    assert len(most) == 8
    assert max(most) <= 2


def test_a_plan_of_memory_has_the_same_weights_and_no_room_for_all_gradients(without_code):
    model, x = Wide(8), torch.randn(4, 64)  # gradients are larger than what is kept
    weights, peaks = [], []
    for within in (False, True):
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        optimizer = in_backward(adamw(copied)) if within else adamw(copied)
        copied.compile(backend="coda", options={"memory": 0.3})
        for _ in range(2):
            copied(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(list(copied.parameters()))
        peaks.append(coda_inductor.reports()[-1].memory.peak)
    assert all(map(torch.equal, *weights))
    assert peaks[0] - peaks[1] >= (8 - 2) * 4 * 64 * 64


def test_accumulation_by_number_and_a_shorter_rest(without_code):
    """Without a number it is an error."""
    models, optimizers = pair(accumulation_steps=2)

    def look(model, number):
        assert kinds(model) == ({Updated} if number else {torch.Tensor})

    for size in (2, 2, 1):
        turn(models, optimizers, *(ids() for _ in range(size)), look=look)
    assert_equal(models)
    (model, _), _optimizers = pair()
    model(ids()).backward()
    with pytest.raises(RuntimeError, match="accumulation_steps=N"):
        model(ids()).backward()


def test_two_forward_passes_before_their_backward_passes(without_code):
    models, optimizers = pair()
    batches = [ids(), ids()]
    for model, optimizer in zip(models, optimizers, strict=True):
        sum(model(batch) for batch in batches).backward()
        optimizer.step()
    assert_equal(models)


def test_a_second_backward_pass_of_one_graph_is_an_error(without_code):
    (model, _), (optimizer, _) = pair()
    loss = model(ids())
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("post", [False, True])
def test_hooks_of_users_see_the_gradient_and_step_updates(post, without_code):
    """Also one that comes after compilation."""
    models, optimizers = pair()
    batch, seen = ids(), []

    def look(model, _):
        assert kinds(model.a) == {torch.Tensor, Updated}
        assert kinds(model.b) == {Updated}

    if post:
        turn(models, optimizers, batch)
    for weight in (model.a.weight for model in models):
        hook = weight.register_post_accumulate_grad_hook if post else weight.register_hook
        hook(lambda t: seen.append((t.grad if post else t).clone()))
    turn(models, optimizers, batch, look=look, times=2)
    assert len(seen) == 4
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert_equal(models)


class Broken(Tied):
    """Two graphs; the embedding's weight is in both."""

    def forward(self, ids):
        x = self.e(ids)
        x = x + self.b(F.silu(self.a(self.n(x))))
        torch._dynamo.graph_break()
        return F.cross_entropy((x @ self.e.weight.t()).flatten(0, 1), ids.flatten())


def test_graphs_that_share_a_weight(without_code):
    models, optimizers = pair(Broken)
    batch = ids()
    turn(models, optimizers, batch, look=all_updated, times=2)
    assert_equal(models)


def test_gradients_of_inputs_alone_update_nothing(without_code):
    """``backward(inputs=...)`` and ``autograd.grad`` run the same backward graph."""
    models, optimizers = pair(Wide)
    x = torch.randn(8, 64, requires_grad=True)
    before = copy.deepcopy(models[0].state_dict())
    got = [torch.autograd.grad(model(x), x)[0] for model in models]
    assert torch.equal(*got)
    assert got[0].abs().max() > 0
    models[0](x).backward(inputs=[x])
    assert kinds(models[0]) == {type(None)}
    assert all(torch.equal(before[k], v) for k, v in models[0].state_dict().items())
    turn(models, optimizers, x.detach(), look=all_updated, times=2)
    assert_equal(models)


def test_gradients_that_autograd_returns_are_an_error(without_code):
    models, _ = pair(Wide)
    x = torch.randn(8, 64)
    before = copy.deepcopy(models[0].state_dict())
    weights = [list(model.parameters()) for model in models]
    with pytest.raises(RuntimeError, match="asks for the gradient"):
        torch.autograd.grad(models[0](x), weights[0])
    assert all(torch.equal(before[k], v) for k, v in models[0].state_dict().items())
    got = torch.autograd.grad(models[1](x), weights[1])  # the same code, without an optimizer
    assert all(g.abs().max() > 0 for g in got)


def test_a_weight_where_another_one_lay_gets_its_gradient(without_code):
    models, _ = pair(Wide)
    for weight in models[1].parameters():
        gone = torch.ones(1)
        optim._LEFT[weight.data_ptr()] = weakref.ref(gone), [torch.full((64, 64), 7.0)]
    del gone
    x = torch.randn(8, 64)
    models[0](x).backward()
    want = torch.autograd.grad(type(models[1]).forward(models[1], x), list(models[1].parameters()))
    models[1](x).backward()
    for weight, gradient in zip(models[1].parameters(), want, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_reading_used_gradients_is_an_error(without_code):
    """By whoever reads them: clipping, a user, a scaler, a closure, a hook."""
    (model, _), (optimizer, _) = pair()
    batch, scaler = ids(), torch.amp.GradScaler("cpu")
    scaler.scale(model(batch)).backward()
    with pytest.raises(RuntimeError, match="already used"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="already used"):
        model.a.weight.grad.add_(1)
    with pytest.raises(RuntimeError, match="already used"):
        scaler.step(optimizer)
    optimizer.zero_grad()

    def closure():
        loss = model(batch)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="already used"):
        optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    model(batch).backward()
    with pytest.raises(RuntimeError, match="to clip, scale, add or log them, train without"):
        optimizer.step()


def test_a_second_gradient_of_uncompiled_ops_is_an_error(without_code):
    (model, _), _ = pair()
    loss = model(ids()) + model.a.weight.square().sum()
    with pytest.raises(RuntimeError, match="uncompiled ops of the loss use too"):
        loss.backward()


def test_a_learning_rate_that_changes_too_late_is_said(without_code, caplog):
    (model, _), (optimizer, _) = pair()
    for rate in (1e-2, 1e-3):
        model(ids()).backward()
        optimizer.param_groups[0]["lr"] = rate
        assert "change it after step()" not in caplog.text
        optimizer.step()
        optimizer.zero_grad()
    assert "change it after step()" in caplog.text


def test_a_model_without_coda_is_updated_by_step_and_said(caplog):
    models, optimizers = pair(compiled=False)
    turn(models, optimizers, ids())
    assert_equal(models)
    assert "no weight was updated in the backward pass" in caplog.text


def test_a_view_of_a_weight_that_the_forward_pass_keeps(without_code):
    """Its readers are readers of the weight."""

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x):
            y, w = x, self.w.t()[::2].flip(0).repeat(2, 1) + self.w.view(256).view(16, 16)
            for _ in range(3):
                y = torch.sin(y @ w + y @ self.w.t())
            return y.square().sum()

    models, optimizers = pair(Viewed)
    batch = torch.randn(4, 16, requires_grad=True)
    turn(models, optimizers, batch, times=2)
    assert_equal(models)


def test_what_is_refused():
    weight = nn.Parameter(torch.randn(4))
    with pytest.raises(OptionError, match="LBFGS may need all gradients"):
        in_backward(torch.optim.LBFGS([weight]))

    class Clips(torch.optim.AdamW):
        def step(self):
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
            super().step()

    with pytest.raises(OptionError, match="Clips may need all gradients"):
        in_backward(Clips([weight]))
    with pytest.raises(OptionError, match="share memory"):
        in_backward(torch.optim.SGD([weight, nn.Parameter(weight.detach())], lr=0.1))
    with pytest.raises(OptionError, match="accumulation_steps=0"):
        in_backward(torch.optim.SGD([weight], lr=0.1), accumulation_steps=0)


def test_several_ranks_are_refused_with_a_reason(without_code, monkeypatch, caplog):
    monkeypatch.setattr("coda_inductor.joint.several_ranks", lambda: True)
    (model, _), _ = pair()
    model(ids()).backward()
    assert kinds(model) == {torch.Tensor}
    assert "gradients of several ranks are added first" in caplog.text


def test_torchaos_states(without_code):
    """Of 8 bits in blocks."""
    torchao = pytest.importorskip("torchao.optim")
    models, optimizers = pair(
        Wide, torch.bfloat16, lambda model: torchao.AdamW8bit(model.parameters(), lr=1e-2)
    )
    batch = torch.randn(8, 64, dtype=torch.bfloat16)
    turn(models, optimizers, batch, look=all_updated, times=2)
    assert_equal(models)
    optimizers[0].load_state_dict(optimizers[1].state_dict())
