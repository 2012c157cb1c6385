# SPDX-License-Identifier: Apache-2.0
"""What may lie between the nodes of an idiom: writes to other memory, and regions of another mode
that end there. All compare with eager, gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, raised, randn, reasons, swiglu
from harness import Harness

from coda_inductor.matching import Hazards
from coda_inductor.semantic.loss import cross_entropy

D, H = 16, 24
BETWEEN = "an in-place op or a grad/autocast mode change lies between its nodes"


def split(between):
    """SwiGLU with ``between(x, count)`` after its gate: ``count`` is memory of its own."""

    def function(x, w, v):
        x, count = x * 1, x.detach() * 1
        gate = F.silu(F.linear(x, w))
        between(x, count)
        return gate * F.linear(x, v) + count.sum()

    return Weights(function, randn(H, D), randn(H, D))


def no_grad(x, count):
    with torch.no_grad():
        count += x.abs()


def nested(x, count):
    with torch.no_grad():
        with torch.enable_grad():
            count.sum()
        count.mul_(2)


def other_autocast(x, count):
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        count.add_(torch.mm(count.float(), count.t().float()).sum())


UNRELATED = {
    "a write": lambda x, count: count.add_(1),
    "an item": lambda x, count: count.__setitem__(0, 3.0),
    "no_grad": no_grad,
    "within each other": nested,
    "autocast": other_autocast,
}


@pytest.mark.parametrize("between", UNRELATED.values(), ids=UNRELATED)
def test_what_concerns_other_memory_is_no_hazard(between):
    harness = check_gradients(split(between), randn(5, D).requires_grad_())
    assert raised(harness, swiglu) == 1


def test_a_mode_that_stays_is_one():
    def function(x, w, v):
        with torch.enable_grad():
            gate = F.silu(F.linear(x, w))
        with torch.no_grad():
            return gate * F.linear(x, v)

    harness = check_gradients(Weights(function, randn(H, D), randn(H, D)), randn(5, D))
    assert raised(harness, swiglu) == 0
    assert BETWEEN in reasons(harness)


#: Writes to what the nodes read or are, and no gradient of eager's forbids them.
RELATED = {
    "the gate": lambda g, u: g.mul_(2),
    "a view of up": lambda g, u: u.view(-1)[:7].zero_(),
    "both": lambda g, u: torch._foreach_mul_([g, u], 2.0),
}


@pytest.mark.parametrize("write", RELATED.values(), ids=RELATED)
def test_writes_to_what_is_read_are_hazards(write):
    def function(g, u):
        g, u = g * 1, u * 1
        s = F.silu(g)
        write(g, u)
        return s * u, g

    harness = check(function, randn(5, H), randn(5, H), disable=["in_place"])
    assert raised(harness, swiglu) == 0
    assert BETWEEN in reasons(harness)


def test_a_loss_of_two_casts_of_logits_that_change_between_them():
    def function(logits, labels):
        logits = logits.float() * 1
        wide = logits.double()
        logits.mul_(2)
        picked = logits.double().gather(-1, labels[..., None]).squeeze(-1)
        return (torch.logsumexp(wide, -1) - picked).mean()

    labels = torch.randint(0, 30, (2, 5))
    harness = check(function, randn(2, 5, 30), labels, disable=["in_place"])
    assert raised(harness, cross_entropy) == 0


def hazards_of(function, *args):
    """``Hazards`` of its graph, and the graph's calls by name."""
    graphs = []

    class Looking(Harness):
        def _raise(self, gm):
            graphs.append(gm.graph)
            return lambda compiled: compiled

    Looking().run(function, *args)
    calls = {n.name: n for n in graphs[0].nodes if n.op in ("call_function", "call_method")}
    return Hazards(graphs[0]), calls


def test_what_a_new_node_is_between():
    """New nodes have a place in the graph, and so a mode."""

    def function(x):
        y = x.sin()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y.cos()
        return z + y

    hazards, calls = hazards_of(function, randn(3))
    sin, cos, add = calls["y"], calls["z"], calls["add"]
    assert not hazards.between((sin, add))
    assert hazards.between((sin, cos))
    for at, apart in ((cos, True), (add, False)):
        with at.graph.inserting_before(at):
            assert hazards.between((sin, at.graph.call_function(torch.neg, (sin,)))) == apart
