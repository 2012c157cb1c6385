# SPDX-License-Identifier: Apache-2.0
"""Hazards of raising, most of which once gave silently wrong results: all compare with eager.

Dynamo's graph is not functional and has modes, so an idiom may be split by a mutation or by a
border of no_grad or autocast, and a node without users may still matter. In-place ops write through
views of every spelling, and in nested graphs.
"""

import operator

import pytest
import torch
import torch.nn.functional as F
from checking import (
    assert_same,
    check,
    check_gradients,
    raised,
    randn,
    reasons,
    side_by_side,
    swiglu,
)
from harness import Harness
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.utils.checkpoint import checkpoint

from coda_inductor.matching.guards import mutates, replace
from coda_inductor.semantic.norms import rms_norm

D = 16
EPS = 1e-5
BETWEEN = "an in-place op or a grad/autocast mode change is between its nodes"


def split_norm(between):
    """RMSNorm with ``between(x, h)`` in the middle; h is x itself (a no-op cast)."""

    def function(x, w):
        x = x + 0  # not an input: mutating one would be a graph break's business
        h = x.to(x.dtype)
        variance = h.pow(2).mean(-1, keepdim=True)
        between(x, h)
        return w * (h * torch.rsqrt(variance + EPS)), x

    return function


def item_assignment(x, h):
    x[:, 0] = 3.0


def region(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


LIBRARY = torch.library.Library("coda_test", "FRAGMENT")
LIBRARY.define("double(Tensor(a!) x) -> ()")
LIBRARY.impl("double", lambda x: (x.mul_(2), None)[1], "CompositeExplicitAutograd")
torch.library.register_fake("coda_test::double", lambda x: None, lib=LIBRARY)


MUTATIONS = {
    "method": lambda x, h: x.mul_(2),
    "through a view": lambda x, h: x[0].add_(1),
    "positional": lambda x, h: F.relu(x, True),
    "item": item_assignment,
    "out=": lambda x, h: torch.mul(x, 2, out=x),
    "foreach": lambda x, h: torch._foreach_mul_([x], 2.0),
    "custom op": lambda x, h: torch.ops.coda_test.double(x),
    "in a region": lambda x, h: region(lambda x: x.add_(1) * 1, x),
}


def test_mutation_between_the_nodes_of_a_norm():
    """Each in a norm of its own, in one graph."""
    function, tensors = side_by_side(map(split_norm, MUTATIONS.values()), (3, D), (D,))
    harness = check(function, *tensors)
    assert raised(harness, rms_norm) == 0
    assert sum(BETWEEN in why.text for why in harness.report.refusals) >= len(MUTATIONS)


@pytest.mark.parametrize(
    "mode",
    [lambda: torch.set_grad_enabled(True), lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
)
def test_mode_that_ends_inside_an_idiom(mode):
    def function(x, w):
        with mode():
            variance = x.pow(2).mean(-1, keepdim=True)
        return w * (x * torch.rsqrt(variance + EPS))

    harness = check(function, randn(3, D, dtype=torch.float32), randn(D, dtype=torch.float32))
    assert raised(harness, rms_norm) == 0
    assert BETWEEN in reasons(harness)


def gradients(function, args):
    args = [a.clone().requires_grad_() for a in args]
    function(*args).sin().sum().backward()
    return [a.grad for a in args]


def wide_norm_then(x, w, labels):
    h = x.float()
    y = w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))
    return y + x.add_(1)


@pytest.mark.parametrize("function", [
    wide_norm_then, lambda x, w, labels: F.cross_entropy(z := x * w, labels) + z.mul_(2),
], ids=["norm", "loss"])  # fmt: skip
def test_gradients_where_the_input_of_an_idiom_changes_behind_it(function):
    """Eager keeps a wide copy, or a log-softmax; the op would keep what is changed."""

    def changed(x, w):
        return function(x + 0, w, torch.arange(3))

    args, harness = [randn(3, D).bfloat16(), randn(D).float()], Harness(disable=["in_place"])
    have = gradients(torch.compile(changed, backend=harness), args)
    assert_same(have, gradients(changed, args), 1e-5)
    assert "changes in place what its gradient reads" in reasons(harness)


WIDENED = {
    "reductions": lambda h: (h * h).mean(-1) - h.mean(-1) ** 2,
    "a difference": lambda h: torch.exp(h * 1e-2) - torch.exp(h * 1e-2 - 1e-9),
    "a comparison": lambda h: torch.where(h > 1000 + 1e-9, h, -h),
    "rms_norm": lambda h: (
        1 - (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-12)).pow(2).mean(-1)
    ),
}


def test_what_is_computed_in_float64_stays_so():
    """A float32 model that widens for a delicate step: neither patterns nor epilogues narrow it."""
    w, b = randn(4 * D, D, dtype=torch.float32), torch.full((4 * D,), 1000.0)

    def function(*xs):
        each = zip(WIDENED.values(), xs, strict=True)
        return [step(F.linear(x, w, b).double()) for step, x in each]

    check(function, *(randn(4, D, dtype=torch.float32) for _ in WIDENED), tolerance=1e-12)


def test_a_norm_has_the_strides_of_torchs():
    """A patch embedding: its tokens lie a picture apart. torch's norms return rows."""

    def function(x):
        n = F.rms_norm(x.flatten(2).transpose(1, 2), (D,))
        return n, n.view(-1, D), torch.as_strided(n, (2, D), (D, 1))

    harness = check(function, randn(2, D, 3, 3))
    assert "stride would change" in reasons(harness)


def test_arithmetic_of_bools_gives_bools():
    def function(x, w):
        h = x @ w
        both = torch.add(torch.where(h > 0, h > -0.5, h < 0.5), h < 0.1)
        return torch.where(both, h, h * 2), both * h

    assert len(check(function, randn(5, D), randn(D, D)).fused) == 1


def test_a_bias_that_torch_does_not_read_is_not_read():
    def function(x, a, w):
        nothing = torch.full((3, D), float("nan"), dtype=x.dtype)
        return torch.addmm(nothing, F.rms_norm(x + x @ a, (D,)), w, beta=0)

    assert check(function, randn(3, D), randn(D, D), randn(D, D)).counts["rms_norm"] == 1


def test_a_float64_operand_makes_a_float64_result():
    """Which has not been through float32."""

    def function(x, w):
        y = w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))
        return y, y.float().double() != y

    harness = check(function, randn(4, D, dtype=torch.float32), randn(D), tolerance=1e-6)
    assert "it mixes float64 with another type" in reasons(harness)


def test_what_concerns_other_memory_is_no_hazard():
    def function(x, w, v):
        x, count = x * 1, x.detach() * 1
        gate = F.silu(F.linear(x, w))
        count.add_(1)
        with torch.no_grad():
            count += x.abs()
        with torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
            count.add_(torch.mm(count.float(), count.t().float()).sum())
        return gate * F.linear(x, v) + count.sum()

    given = (randn(*shape).requires_grad_() for shape in ((5, D), (24, D), (24, D)))
    assert raised(check_gradients(function, *given), swiglu) == 1


T = 12
sdpa = F.scaled_dot_product_attention


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


def own_tensor(q, m):
    return region(lambda q: (q * 2).relu_(), q)


split = in_place(lambda m: torch.split(tensor=m, split_size_or_sections=T)[0])
#: What changes a mask, of queries and the mask, and returns queries; is it all in a region?
CHANGES = (
    (split, False), (split, True), (own_tensor, False), (own_tensor, True),
    (in_place(lambda m: torch.broadcast_tensors(torch.zeros(T, T), m)[1]), False),
    (from_argument, True), (through_a_region, False),
    (lambda q, m: region(lambda q, m: from_argument(q, m) + 1, q, m), False),
)  # fmt: skip


def attend(change, inside, q, k, v):
    m = torch.ones(T, T, dtype=torch.bool).tril()

    def body(q):
        return sdpa(change(q, m), k, v, attn_mask=m).sin()

    return region(body, q) if inside else body(q)


def test_a_changed_mask_stays():
    """All in one graph; two changes are of another tensor."""
    each = [lambda q, k, v, c=change: attend(*c, q, k, v) for change in CHANGES]
    function, tensors = side_by_side(each, *3 * [(2, 2, T, 8)])
    harness = check_gradients(function, *(t.requires_grad_() for t in tensors))
    assert harness.counts["constant_mask"] == 2
    assert reasons(harness).count("an in-place op changes it") == len(CHANGES) - 2


@pytest.mark.parametrize(("wanted", "dynamic"), [(False, False), (True, True)])
def test_the_backward_pass_computes_nothing_from_an_input_that_has_changed(wanted, dynamic):
    """A regression: 2 * x was made again from x, which by then held it. Autograd raised."""

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


def test_what_changes_memory_is_never_erased():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    changed = graph.call_method("add_", (graph.call_function(torch.cos, (x,)), 1))
    read = graph.call_function(torch.sin, (changed,))
    graph.output((x,))
    replace(read, x)
    assert [node.name for node in graph.nodes] == ["x", "cos", "add_", "output"]
