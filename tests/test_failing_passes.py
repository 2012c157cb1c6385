# SPDX-License-Identifier: Apache-2.0
"""Wherever a pass of ours fails, at its start, half way or at its end, the graph is put back: it
compiles, to eager's numbers, with one warning."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import T, Whole
from checking import assert_same, replace_pass
from harness import Harness
from torch.fx import Graph, Node

from coda_inductor import log, pipeline
from coda_inductor.dynamo import late_gradients
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.runtime import linear_cross_entropy

PASSES = list(dict.fromkeys(each.name for each in (*pipeline.ON_DYNAMO, *pipeline.ON_ATEN)))
#: Without one of these only these run.
NEEDED = [each.name for each in (*pipeline.ON_DYNAMO, *pipeline.ON_ATEN) if each.needed]
#: Those that do nothing without a backward pass.
BACKWARD = ["late_gradients", "loss", "embedding", "recompute", "borders"]

#: What changes a graph.
CHANGES = [(Graph, "create_node"), (Graph, "erase_node"), (Node, "replace_all_uses_with")]


BUSY = ("idioms", "embedding", "norm", "decompose", "fuse")
SOME = (*BUSY, "packed", "noops", "loss", "recompute", "decompose_rest")
#: Number -> the passes that make as many changes here; the others set arguments or tags.
MANY = {1: (*SOME, "late_gradients"), 20: BUSY}


class Failing:
    """``function`` that raises when it is entered, when it has done its work, or in front of its
    ``how``-th change of a graph."""

    def __init__(self, function, how):
        self.function, self.how, self.changes, self.failed = function, how, 0, False

    def __call__(self, *args, **kwargs):
        if self.how == "start":
            self.fail()
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in CHANGES:
                patch.setattr(owner, name, self.counted(getattr(owner, name)))
            result = self.function(*args, **kwargs)
        if self.how == "end":
            self.fail()
        return result

    def counted(self, change):
        def call(*args, **kwargs):
            self.changes += 1
            if self.changes == self.how:
                self.fail()
            return change(*args, **kwargs)

        return call

    def fail(self):
        self.failed = True
        raise IndexError("a bug of ours")


def step(function, model, training):
    """Loss, logits and gradients."""
    tokens = torch.arange(2 * T).view(2, T) % 7
    model.train(training)
    with torch.set_grad_enabled(training):
        loss, logits = function(tokens, tokens.roll(1, 1))
    if training:
        loss.backward()
    return loss, logits, [p.grad for p in model.parameters()]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Logits count as large, and warnings are spoken."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 2**8)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 0)
    log.forget_warnings()
    torch._dynamo.reset()


def compare(compiler, training):
    torch.manual_seed(0)
    ours, eager = (copy.deepcopy(m) for m in [Whole()] * 2)
    have = step(torch.compile(ours, backend=compiler), ours, training)
    assert_same(have, step(eager, eager, training))


def said(caplog):
    return [text for r in caplog.records if "a bug of ours" in (text := r.getMessage())]


def fail_together(which, how, compiler, training, monkeypatch):
    """Some passes fail in one compilation, all of which numbers survive; returns their names."""
    names = [name for name in PASSES if training or name not in BACKWARD]
    others = [name for name in names if name not in NEEDED]
    parts = {"even": others[::2], "odd": others[1::2], "needed": [n for n in names if n in NEEDED]}
    chosen = {
        name: replace_pass(monkeypatch, name, lambda run: Failing(run, how))
        for name in parts[which]
    }
    compare(compiler, training)
    assert [name for name, each in chosen.items() if not each.failed] == []
    return [*chosen]


@pytest.mark.parametrize("which", ["even", "odd", "needed"])
def test_at_the_start(which, monkeypatch, caplog):
    """Nothing is put back, others find what those have left."""
    first, *_ = fail_together(which, "start", Harness(strict=False), True, monkeypatch)
    (warning,) = said(caplog)
    assert f": pass {first} falls back to Inductor: IndexError in our own passes" in warning


@pytest.mark.parametrize(("name", "how"), [(name, how) for how in MANY for name in MANY[how]])
def test_between_two_of_its_changes(name, how, monkeypatch, caplog):
    """A net inside a pass may catch it: one match is lost then, or one GEMM."""
    failing = replace_pass(monkeypatch, name, lambda run: Failing(run, how))
    compare(Harness(strict=False), True)
    assert failing.failed
    assert len(said(caplog)) <= 1


@pytest.mark.parametrize(("which", "training"), [("even", True), ("needed", True), ("odd", False)])
def test_inductor_compiles_what_is_put_back(which, training, monkeypatch, caplog):
    """Several fail when they have done their work: one at a time would compile for minutes."""
    fail_together(which, "end", "coda", training, monkeypatch)
    assert len(said(caplog)) == 1  # of one kind


def test_a_pass_that_others_need_takes_them_along(monkeypatch, caplog):
    """Views that nobody refreshes look as if they shared no memory: Inductor would write over what
    is still to be read."""
    for name in ("idioms", "refresh_views"):
        replace_pass(monkeypatch, name, lambda run: Failing(run, "end"))
    compare("coda", True)
    assert "a bug of ours" in caplog.text


def test_a_graph_out_of_order_is_put_back():
    """As it is between a rewrite and the sorting after it."""
    graph = Graph()
    x = graph.placeholder("x")
    x._dynamo_source, x.meta["val"] = "L['x']", 1
    first = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch.cos, (first,))
    output = graph.output((second,))
    output.meta["desc"] = "an output"
    kept = snapshot(graph)
    x.meta["val"] = 2
    second.append(first)
    with graph.inserting_before(output):
        graph.call_function(torch.tan, (second,))
    second.args = (first, first)
    restore(graph, kept)
    graph.lint()
    assert [n.target for n in graph.nodes] == ["x", torch.sin, torch.cos, "output"]
    assert next(iter(graph.nodes)) is x
    assert x.meta["val"] == 1
    assert graph.output_node().meta == {"desc": "an output"}
