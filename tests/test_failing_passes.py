# SPDX-License-Identifier: Apache-2.0
"""Wherever a pass of ours fails, at its start, half way or at its end, the graph is put back: it
compiles, to eager's numbers, with one warning."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, replace_pass
from harness import Harness
from torch import nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from coda_inductor import log, pipeline
from coda_inductor.dynamo import late_gradients
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.runtime import linear_cross_entropy

V, D, F_, H, T = 96, 16, 24, 2, 6


class Llama(nn.Module):
    """One layer in which every pass finds something to do: a table that the head shares, a packed
    projection, constant mask, norms, a checkpointed region, loss and logits."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, D)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate_up = nn.Linear(D, 2 * F_, bias=False)
        self.down = nn.Linear(F_, D, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(D) for _ in range(3))

    def attend(self, x):
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, H, D // H)
        q, k, v = (t.transpose(1, 2) for t in heads.unbind(2))
        mask = torch.arange(T)[:, None] >= torch.arange(T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(y.transpose(1, 2).reshape(x.shape))

    def feed(self, x):
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(torch.ops.aten.silu.default(gate) * up)

    def forward(self, tokens, labels):
        x = self.attend(self.table(tokens))
        x = checkpoint(self.feed, x, use_reentrant=False) if self.training else self.feed(x)
        logits = F.linear(self.norm3(x), self.table.weight)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1)), logits


PASSES = [each.name for each in (*pipeline.ON_DYNAMO, *pipeline.ON_ATEN)]
#: Without one of these only these run.
NEEDED = [each.name for each in (*pipeline.ON_DYNAMO, *pipeline.ON_ATEN) if each.needed]
OTHERS = [name for name in PASSES if name not in NEEDED]
#: Those that do nothing without a backward pass.
BACKWARD = [
    "late_gradients", "loss", "embedding",
    "recompute", "views", "borders",
]  # fmt: skip

#: What changes a graph.
CHANGES = [(Graph, "create_node"), (Graph, "erase_node"), (Node, "replace_all_uses_with")]


BUSY = ("idioms", "embedding", "packed", "norm", "decompose", "fuse")
SOME = (*BUSY, "noops", "loss", "recompute", "decompose_rest")
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
    ours, eager = (copy.deepcopy(m) for m in [Llama()] * 2)
    have = step(torch.compile(ours, backend=compiler), ours, training)
    assert_same(have, step(eager, eager, training))


def check(name, how, compiler, training, monkeypatch, caplog):
    """The pass ``name`` fails so: the numbers are eager's. Returns the warnings."""
    failing = replace_pass(monkeypatch, name, lambda run: Failing(run, how))
    compare(compiler, training)
    messages = [r.getMessage() for r in caplog.records if r.name == log.logger.name]
    assert failing.failed
    return [m for m in messages if "a bug of ours" in m]


def together(training):
    """Passes that fail in one compilation."""
    ran = [name for name in OTHERS if training or name not in BACKWARD]
    needed = [name for name in NEEDED if training or name not in BACKWARD]
    return {"even": ran[::2], "odd": ran[1::2], "needed": needed}


@pytest.mark.parametrize("which", ["even", "odd", "needed"])
def test_at_the_start(which, monkeypatch, caplog):
    """Nothing is put back, others find what those have left."""
    chosen = together(True)[which]
    failing = [replace_pass(monkeypatch, n, lambda run: Failing(run, "start")) for n in chosen]
    compare(Harness(strict=False), True)
    assert [n for n, each in zip(chosen, failing, strict=True) if not each.failed] == []
    (warning,) = [text for r in caplog.records if "a bug of ours" in (text := r.getMessage())]
    assert warning.startswith(f"pass {chosen[0]} falls back to Inductor")


@pytest.mark.parametrize(("name", "how"), [(name, how) for how in MANY for name in MANY[how]])
def test_between_two_of_its_changes(name, how, monkeypatch, caplog):
    """A net inside a pass may catch it: one match is lost then, or one GEMM."""
    assert len(check(name, how, Harness(strict=False), True, monkeypatch, caplog)) <= 1


@pytest.mark.parametrize(("which", "training"), [("even", True), ("needed", True), ("odd", False)])
def test_inductor_compiles_what_is_put_back(which, training, monkeypatch, caplog):
    """Several fail when they have done their work: one at a time would compile for minutes."""
    chosen = together(training)[which]
    failing = [replace_pass(monkeypatch, n, lambda run: Failing(run, "end")) for n in chosen]
    compare("coda", training)
    assert [n for n, each in zip(chosen, failing, strict=True) if not each.failed] == []
    assert sum("a bug of ours" in r.getMessage() for r in caplog.records) == 1  # of one kind


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
