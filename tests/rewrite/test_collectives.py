# SPDX-License-Identifier: Apache-2.0
"""Collectives that are merged: the same numbers on every rank, fewer messages. Ranks are simulated
in lock step, on whole numbers, which float64 adds and multiplies exactly."""

from collections import Counter

import pytest
import torch
from passes import aten_graph, run_pass
from torch.fx import Graph

from coda_inductor.compat import (
    all_gather_into_tensor,
    all_reduce,
    reduce_scatter_tensor,
    wait_tensor,
)
from coda_inductor.rewrite.collectives import merge_collectives

RANKS, M, N, K = 2, 4, 6, 3
aten = torch.ops.aten


def reduced(x, how="sum", group="0"):
    return wait_tensor(all_reduce(x, how, group))


def gathered(x):
    return wait_tensor(all_gather_into_tensor(x, RANKS, "0"))


def scattered(x):
    """Along the second dimension, as DTensor does it."""
    pieces = torch.split(x, x.shape[1] // RANKS, 1)
    return wait_tensor(reduce_scatter_tensor(torch.cat(pieces), "sum", RANKS, "0"))


def numbers(*shapes) -> list[torch.Tensor]:
    return [torch.randint(-9, 10, shape).double() for shape in shapes]


def on_ranks(graph: Graph, inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The outputs on each rank; ``inputs`` is one list a rank."""
    ranks = range(len(inputs))
    values: dict = {}
    given = iter(zip(*inputs, strict=True))
    for node in graph.nodes:
        args = [torch.fx.node.map_arg(node.args, lambda n, r=r: values[n][r]) for r in ranks]
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return [list(args[rank][0]) for rank in ranks]
        elif node.target is all_gather_into_tensor:
            values[node] = [torch.cat([a[0] for a in args])] * len(ranks)
        elif node.target in (all_reduce, reduce_scatter_tensor):
            total = sum(a[0] for a in args)
            parts = [total] * len(ranks) if node.target is all_reduce else total.chunk(len(ranks))
            values[node] = parts
        elif node.target is wait_tensor:
            values[node] = [a[0] for a in args]
        else:
            values[node] = [node.target(*a, **node.kwargs) for a in args]
    raise AssertionError("no output")


def merged(function, *shapes):
    """What the pass counted and which ops it left; its graph must give the same."""
    inputs = [numbers(*shapes) for _ in range(RANKS)]
    graph = aten_graph(function, *inputs[0])
    want = on_ranks(graph, inputs)
    record = run_pass(merge_collectives, graph)
    have = on_ranks(graph, inputs)
    for ours, theirs in zip(have, want, strict=True):
        assert all(map(torch.equal, ours, theirs))
    left = Counter(node.target for node in graph.nodes)
    assert not run_pass(merge_collectives, graph).fired
    return record.fired["collective"], left


MATRICES = ((M, K), (K, N), (M, K), (K, N), (M, K), (K, N))


def views_between(a, b, c, d):
    one, two = (reduced((x @ y).view(2, 2, N)) for x, y in ((a, b), (c, d)))
    return (one.view(M, N) + two.view(M, N),)


def put_together_otherwise(n, wg, wu):
    one, two = (torch.cat(torch.split(gathered(n), 2), 1) for _ in range(2))
    return one @ wg, two @ wu


CUT = {aten.split.Tensor: 1, aten.cat.default: 1}
#: Name -> (function, shapes, messages that are saved, how often ops are left).
MERGED = {
    "as of q, k and v": (
        lambda a, b, c, d, e, f: ((reduced(a @ b) + reduced(c @ d)) + reduced(e @ f) + 1,),
        MATRICES, 2, {all_reduce: 1, wait_tensor: 1},
    ),
    "views between": (views_between, MATRICES[:4], 1, {all_reduce: 1}),
    "added before it is cut": (
        lambda a, b, c, d: (scattered(a @ b) + scattered(c @ d),), MATRICES[:4], 1, CUT,
    ),
    "other pieces": (
        lambda a, b, c, d: (
            scattered(a @ b) + wait_tensor(reduce_scatter_tensor(c @ d, "sum", RANKS, "0")),
        ),
        ((2, K), (K, N), (4, K), (K, 3)), 1, CUT,
    ),
    "gate and up read one operand": (
        put_together_otherwise, ((2, K), (2 * K, N), (2 * K, N)), 1,
        {all_gather_into_tensor: 1, aten.cat.default: 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "shapes", "number", "ops"), MERGED.values(), ids=MERGED)
def test_what_is_merged(function, shapes, number, ops):
    saved, left = merged(function, *shapes)
    assert saved == number
    assert {op: left[op] for op in ops} == ops


def waited_for_twice(a, b, first):
    """A caller may write to the second result."""
    one = all_reduce(a, "sum", "0")
    terms = [wait_tensor(one), reduced(b)]
    return torch.add(*terms[:: 1 if first else -1]), wait_tensor(one)


#: Functions of two tensors. A caller may write to a result, and so to one of two that are returned.
APART = (
    lambda a, b: (reduced(a) + reduced(b, "max"),),
    lambda a, b: (reduced(a) + reduced(b, group="1"),),
    lambda a, b: (reduced(a) * reduced(b),),
    lambda a, b: (torch.add(reduced(a), reduced(b), alpha=2),),
    lambda a, b: (reduced(a) + b,),
    lambda a, b: (reduced(a) + reduced(b[:1]),),
    lambda a, b: (reduced(a) + reduced(b).t().reshape(M, N),),
    lambda a, b: waited_for_twice(a, b, True),
    lambda a, b: waited_for_twice(a, b, False),
    lambda a, b: ((one := reduced(a)) + reduced(b), one.relu()),
    lambda a, b: (gathered(a), gathered(a).view(-1)),
)


@pytest.mark.parametrize("function", APART)
def test_nothing_else_is_merged(function):
    graph = aten_graph(function, *numbers((M, N), (M, N)))
    before = str(graph)
    assert not run_pass(merge_collectives, graph).fired
    assert str(graph) == before


def test_checkpoints_and_passes_keep_their_own_and_it_can_be_disabled():
    def step(n, w, dz):
        z = gathered(n) @ w
        return z, dz.t() @ gathered(n)

    for key in ("ac_graph_id", "recompute"):
        graph = aten_graph(
            lambda a, b, w: (reduced(a) + reduced(b), gathered(w) @ a, gathered(w) @ b),
            *numbers((M, N), (M, N), (2, M)),
        )
        for target in (all_reduce, all_gather_into_tensor):
            [first, _] = [node for node in graph.nodes if node.target is target]
            first.meta[key] = 1
        assert not run_pass(merge_collectives, graph).fired
    sums = aten_graph(MERGED["views between"][0], *numbers(*MATRICES[:4]))
    assert not run_pass(merge_collectives, sums, disable=["collective"]).fired
    for name, saved in (("input", 1), ("tangents_1", 0)):
        graph = aten_graph(step, *numbers((2, K), (K, N), (4, N)))
        [*_, last] = [node for node in graph.nodes if node.op == "placeholder"]
        last.target = name
        assert run_pass(merge_collectives, graph).fired["collective"] == saved
