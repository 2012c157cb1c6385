# SPDX-License-Identifier: Apache-2.0
"""``coda_inductor.enable()``: the passes under backend="inductor".

Inductor's own compile runs, with its hooks, decompositions and partitioner; its generated code is
swapped for eager execution of the graphs.
"""

import copy
import functools
import pickle
import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, randn, slice_logits
from harness import as_it_is
from test_backend import UsersPass
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint
from zoo.layers import D, whole

import coda_inductor
from coda_inductor import OptionError, pass_mode, report
from coda_inductor.backend import coda
from coda_inductor.dynamo import late_gradients

#: backend="inductor" without code generation.
inductor = functools.partial(compile_fx, inner_compile=as_it_is)


@pytest.fixture(autouse=True)
def nothing_enabled(without_code):
    with config.patch({pass_mode.DYNAMO: None, pass_mode.JOINT: None}):
        yield
        assert hooks() == (None, None), "a test put back what it found"


def hooks():
    return config.pre_grad_custom_pass, config.joint_custom_pre_pass


def compiled(model, backend):
    return torch.compile(model, backend=backend) if backend else model


def step(model, *args, backend=inductor):
    """One training step: (counters, outputs and gradients)."""
    torch._dynamo.reset()
    counters.clear()
    model, args = copy.deepcopy((model, args))
    out = compiled(model, backend)(*args)
    out.square().sum().backward()
    grads = [t.grad for t in (*model.parameters(), *args) if t.is_floating_point()]
    return Counter(counters["coda"]), [out.detach(), *grads]


def infer(model, *args, backend=inductor):
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        out = compiled(model, backend)(*args)
    return Counter(counters["coda"]), [out]


class Regions(nn.Module):
    """Blocks that are traced once, however many there are."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(whole(), nn.Linear(16, D)) for _ in range(4))

    def forward(self, x):
        @torch.compiler.nested_compile_region
        def region(block, x):
            return block(x)

        for block in self.blocks:
            x = region(block, x)
        return x


def test_what_fires_is_what_fires_with_the_backend():
    model, x = Regions().double(), randn(2, 5, D).requires_grad_()
    _, eager = step(model, x, backend=None)
    report.forget()
    want, _ = step(model, x, backend=coda)
    with coda_inductor.enabled():
        have, values = step(model, x)
    assert have == want
    assert have["rms_norm"] == 1
    assert_same(values, eager)
    reports = [(r.summary, [str(why) for why in r.refusals]) for r in report.reports()]
    assert reports[: len(reports) // 2] == reports[len(reports) // 2 :]


def test_graphs_that_are_compiled_one_by_one():
    """As vLLM does it with the pieces of a model."""

    def backend(gm, inputs):
        return torch._inductor.standalone_compile(gm, inputs, dynamic_shapes="from_graph")

    model, x = nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D), nn.Linear(D, D)), torch.randn(3, D)
    with coda_inductor.enabled():
        have, values = infer(model, x, backend=backend)
    assert have["rms_norm"] == 1
    assert_same(values, [model(x)])


def test_the_backward_pass_may_be_compiled_later_and_elsewhere():
    model, x = whole().double(), randn(4, D).requires_grad_()
    saved = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    want, eager = step(model, x, backend=coda)
    counters.clear()
    with coda_inductor.enabled():
        loss = torch.compile(saved, backend=inductor)(x).square().sum()
    coda_inductor.enable(gate="never", disable=["swiglu"])  # no concern of what was begun
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    coda_inductor.disable()
    assert Counter(counters["coda"]) == want
    assert_same([p.grad for p in (*model.parameters(), x)], eager[1:])


@pytest.mark.parametrize("kind", ["function", "tuple"])
def test_a_users_own_passes_run_in_front_and_are_put_back(kind):
    first, second = UsersPass("1"), UsersPass("2")
    theirs = [each.__call__ if kind == "function" else (each,) for each in (first, second)]
    names = (pass_mode.DYNAMO, pass_mode.JOINT)
    with config.patch(dict(zip(names, theirs, strict=True))):
        coda_inductor.enable()
        counts, _ = infer(whole(), torch.randn(3, D))
        coda_inductor.disable()
        assert all(have is want for have, want in zip(hooks(), theirs, strict=True))
    assert (first.calls, second.calls) == (1, 1)
    assert counts["rms_norm"] == 1


def test_contexts_nest_and_end_with_exceptions():
    """To enable twice is to enable once, with the newer options."""
    model, x = whole(), torch.randn(3, D)
    with coda_inductor.enabled():
        before = hooks()
        with pytest.raises(ZeroDivisionError), coda_inductor.enabled(disable=["swiglu"]):
            1 / 0  # noqa: B018
        assert hooks() == before
        assert infer(model, x)[0]["swiglu"] == 1
        with coda_inductor.enabled(gate="never"):
            coda_inductor.enable(disable="swiglu")
            assert infer(model, x)[0] == {"rms_norm": 1, "residual": 1}
            coda_inductor.disable()
            assert not infer(model, x)[0]
        assert hooks() == before


def test_a_wrong_option_changes_nothing():
    with coda_inductor.enabled():
        before = hooks()
        for options in ({"disable": ["swigul"]}, {"max_autotune": True}):
            with pytest.raises(OptionError):
                coda_inductor.enable(**options)
        assert hooks() == before


def test_what_was_set_since_stays():
    """Also in a list with ours; torch may copy or pickle its configuration for a key."""
    mine, since = UsersPass("1"), UsersPass("2")
    coda_inductor.enable()
    assert pickle.dumps(hooks()[0]) == pickle.dumps(copy.deepcopy(hooks()[0]))
    assert config.get_config_copy()[pass_mode.JOINT].uuid() == hooks()[1].uuid()
    config.joint_custom_pre_pass = [mine, config.joint_custom_pre_pass, since]
    for _ in range(2):
        coda_inductor.disable()
        assert hooks() == (None, [mine, since])
    config.joint_custom_pre_pass = None


def test_the_backend_is_not_disturbed():
    theirs = UsersPass(), UsersPass()
    config.pre_grad_custom_pass, config.joint_custom_pre_pass = theirs
    model, x = whole(), torch.randn(3, D, requires_grad=True)
    reports = len(coda_inductor.reports())
    with coda_inductor.enabled(disable=["*"]):
        assert hooks() == theirs
    with coda_inductor.enabled(disable=["swiglu"]):
        assert step(model, x, backend=coda)[0]["swiglu"] == 1
    assert len(coda_inductor.reports()) == reports + 1
    assert [each.calls for each in theirs] == [1, 1]
    config.pre_grad_custom_pass = config.joint_custom_pre_pass = None


def test_returned_logits_keep_their_gradient(monkeypatch):
    """There is nothing around the compiled graph that could add it later."""
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 0)
    slice_logits(monkeypatch, 2**8)
    head, x, y = nn.Linear(D, 64).double(), randn(6, D), torch.arange(6)

    def function(x, y):
        logits = head(x)
        return logits, F.cross_entropy(logits, y)

    results = []
    with coda_inductor.enabled():
        for call in (torch.compile(function, backend=inductor), function):
            head.zero_grad()
            logits, loss = call(x, y)
            (loss + logits.square().sum()).backward()
            results.append([logits.detach(), loss.detach(), head.weight.grad, head.bias.grad])
    assert counters["coda"]["cross_entropy"] == 1
    assert_same(*results)


def test_a_torch_without_what_we_need_is_left_alone(monkeypatch, warned):
    for attribute, value, name in (
        ("missing_names", lambda: ["torch.nothing"], "torch.nothing"),
        ("DYNAMO", "pre_grad_of_tomorrow", "torch._inductor.config.pre_grad_of_tomorrow"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(pass_mode, attribute, value)
            with coda_inductor.enabled():
                assert hooks() == (None, None)
            assert any(f"has no {name}" in text for text in warned())
