# SPDX-License-Identifier: Apache-2.0
"""What an in-place op may write to: through views of every spelling, and in nested graphs."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, check, check_gradients, raised, randn, reasons
from harness import Harness
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo.nodes import erase
from coda_inductor.matching import mutates
from coda_inductor.semantic.norms import rms_norm

T, D = 12, 16
sdpa = F.scaled_dot_product_attention


def region(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def from_argument(q, m):
    def body(q, m):
        m[:, :3] = False
        m[:, 0] = True  # or a row would see nothing
        return q * 2

    return region(body, q, m)


def through_a_region(q, m):
    region(lambda m: m.view(-1), m)[T] = False
    return q


def in_place(view):
    def change(q, m):
        view(m)[1:, 0] = False
        return q

    return change


#: Of queries and a mask; returns queries.
CHANGES = {
    "split": in_place(lambda m: torch.split(tensor=m, split_size_or_sections=T)[0]),
    "broadcast": in_place(lambda m: torch.broadcast_tensors(torch.zeros(T, T), m)[1]),
    "checkpointed argument": from_argument,
    "nested checkpoints": lambda q, m: region(lambda q, m: from_argument(q, m) + 1, q, m),
    "view out of a checkpoint": through_a_region,
    "its own tensor": lambda q, m: region(lambda q: (q * 2).relu_(), q),
}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "in front") for name in CHANGES),
        *((name, "in a region") for name in ("split", "checkpointed argument", "its own tensor")),
    ],
)
def test_a_changed_mask_stays(name, where):
    def attend(q, k, v):
        m = torch.ones(T, T, dtype=torch.bool).tril()

        def body(q):
            return sdpa(CHANGES[name](q, m), k, v, attn_mask=m).sin()

        return body(q) if where == "in front" else region(body, q)

    harness = check_gradients(attend, *(randn(2, 2, T, 8).requires_grad_() for _ in range(3)))
    own = name == "its own tensor"
    assert harness.counts["constant_mask"] == own
    assert own or "an in-place op changes it" in reasons(harness)


def test_a_region_that_changes_a_tensor_between_the_nodes_of_a_norm():
    def function(x, w):
        x = x * 1
        variance = x.pow(2).mean(-1, keepdim=True)
        y = region(lambda x: x.add_(1) * 1, x)
        return w * (x * torch.rsqrt(variance + 1e-5)), y

    harness = check(function, randn(4, D), randn(D))
    assert raised(harness, rms_norm) == 0


def test_what_writes_and_what_only_ends_in_an_underscore():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for name in ("__setitem__", "__iadd__", "__imul__", "add_", "copy_", "relu_"):
        assert mutates(graph.call_method(name, (x, x)))
        assert not mutates(graph.call_method(name.strip("_").removeprefix("i"), (x, x)))
    for op in (operator.and_, operator.or_):  # a regression
        assert not mutates(graph.call_function(op, (x, x)))
    assert mutates(graph.call_function(operator.iand, (x, x)))
    assert mutates(graph.call_function(triton_kernel_wrapper_mutation, (), {"kwargs": {"x": x}}))


@pytest.mark.parametrize("wanted", [False, True], ids=["", "its gradient is wanted"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_backward_pass_computes_nothing_from_an_input_that_has_changed(wanted, dynamic):
    """A regression: 2 * x was made again from x, which by then held it already. Autograd noticed
    and raised."""

    def changed(x, w):
        x.mul_(2)
        return torch.sin(x @ w) * x

    x, w = randn(6, D), randn(D, D)
    results = []
    for compiled in (torch.compile(changed, backend=Harness(), dynamic=dynamic), changed):
        leaf, weight = x.clone().requires_grad_(wanted), w.clone().requires_grad_()
        inner = leaf * 1
        y = compiled(inner, weight)
        torch.autograd.backward(y, torch.ones_like(y))
        results.append((y, inner, weight.grad, leaf.grad))
    assert_same(*results)


def test_a_buffer_of_an_exported_program_is_no_unknown_graph():
    """Its name has dots. A call that is given one and a graph changes what the graph changes."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.BatchNorm1d(4)

        def forward(self, x):
            with torch.no_grad():
                y = x * self.inner.running_mean
            return y + x

    graph = torch.export.export(Scaled(), (torch.ones(3, 4, requires_grad=True),)).module().graph
    (call,) = (n for n in graph.nodes if "set_grad_enabled" in str(n.target))
    assert any(n.op == "get_attr" and "." in str(n.target) for n in call.all_input_nodes)
    assert not mutates(call)


def test_what_changes_memory_is_never_erased():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    changed = graph.call_method("add_", (graph.call_function(torch.cos, (x,)), 1))
    read = graph.call_function(torch.sin, (changed,))
    graph.output((x,))
    erase(read)
    assert [node.name for node in graph.nodes] == ["x", "cos", "add_", "output"]
