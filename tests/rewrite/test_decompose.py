# SPDX-License-Identifier: Apache-2.0
"""The first pass and the last ones, on graphs made by hand: what changes nothing goes; experts that
no epilogue took are one product a weight; what a checkpointed block hands to the next is saved."""

import pytest
import torch
from checking import assert_same, randn
from passes import aten_graph, run_pass
from torch.utils.checkpoint import CheckpointPolicy as Policy

from coda_inductor import pipeline
from coda_inductor.compat import storage
from coda_inductor.graph.layout import refresh_views
from coda_inductor.rewrite.experts import finish_experts
from coda_inductor.semantic.experts import grouped_mm

aten = torch.ops.aten


A, D, W = (5, 16), (5, 8), (3, 16, 16)


def halves_of(x, y, w, groups):
    lower, upper = torch.split(w, 8, 2)
    return grouped_mm(x, lower, groups, None) * grouped_mm(y, upper, groups, None)


def summed(*parts, width=8, copied=False):
    """The sum of products with two parts of a weight; the others are returned."""

    def function(x, y, w, groups):
        each = [part.permute(0, 2, 1) for part in torch.split(w, width, 2)]
        first = grouped_mm(x, each[parts[0]], groups, None)
        second = grouped_mm(y, each[parts[1]], groups.clone() if copied else groups, None)
        return first + second, *each[2:]

    return function


#: A function of tensors and of the offsets of groups, their shapes, the products that are left.
GROUPED = {
    "halves of a weight": (lambda x, w, o: halves_of(x, x, w, o), (A, W), 1),
    "of different rows": (halves_of, (A, A, W), 2),
    "a sum in the other order": (summed(1, 0), (D, D, W), 1),
    "a sum over one half twice": (summed(0, 0), (D, D, W), 2),
    "a sum over two of four parts": (summed(0, 1, width=4), ((5, 4), (5, 4), W), 2),
    "a sum of two groupings": (summed(0, 1, copied=True), (D, D, W), 2),
}


@pytest.mark.parametrize(("function", "shapes", "left"), GROUPED.values(), ids=GROUPED)
def test_products_by_all_parts_of_one_weight_are_one(function, shapes, left):
    given = *(randn(*shape) for shape in shapes), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    graph = aten_graph(function, *given)
    run_pass(finish_experts, graph)
    assert sum(n.target is grouped_mm for n in graph.nodes) == left
    assert_same(torch.fx.GraphModule({}, graph)(*given), function(*given))


(BORDERS,) = (each.run for each in pipeline.ON_ATEN if each.name == "borders")
AGAIN, SAVED, ASKED = Policy.PREFER_RECOMPUTE, Policy.MUST_SAVE, Policy.MUST_RECOMPUTE


def viewed(x):
    return x.sin().view(24).cos()


#: Name -> (a function, the number of the checkpoint that its cosine lies in, where the rest lies in
#: 0, and node -> tag after the pass).
CASES = {
    "a view is saved as what it views": (viewed, 1, {"sin": SAVED, "view": None, "cos": AGAIN}),
    "one of several outputs takes the call and the others with it": (
        lambda x: ((found := x.sort())[0].cos(), found[1]), 1,
        {"sort": None, "getitem": None, "getitem_1": None, "cos": AGAIN},
    ),
    "a transpose too": (lambda x: x.sin().t().cos(), 1, {"sin": SAVED, "t": None, "cos": AGAIN}),
    "a product is saved if it is small beside its factors, and no policy says otherwise": (
        lambda x: ((y := x.repeat(1, 16)).mm(one := (z := y.t())[:, :1]), y.mm(z), y.mm(one)), 0,
        dict.fromkeys(("repeat", "t", "slice_1", "mm_1"), AGAIN) | {"mm": SAVED, "mm_2": ASKED},
    ),
    "no later block reads": (viewed, 0, dict.fromkeys(("sin", "view", "cos"), AGAIN)),
}  # fmt: skip


@pytest.mark.parametrize(("function", "block", "tags"), CASES.values(), ids=CASES)
def test_what_a_later_block_reads_is_saved(function, block, tags):
    graph = aten_graph(function, torch.empty(4, 6))
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    for node in nodes:
        own = block if node.name == "cos" else 0
        node.meta |= {"recompute": ASKED if node.name == "mm_2" else AGAIN, "ac_graph_id": own}
    run_pass(BORDERS, graph)
    assert {node.name: node.meta["recompute"] for node in nodes} == tags


def test_views_of_what_was_replaced_are_views_of_the_new_node():
    graph = aten_graph(lambda x: (x.cos(), x.sin().view(12)), torch.ones(4, 3))
    (sine,), (cosine,), (view,) = (
        graph.find_nodes(op="call_function", target=target.default)
        for target in (aten.sin, aten.cos, aten.view)
    )
    view.replace_input_with(sine, cosine)
    assert storage(view.meta["val"]) == storage(sine.meta["val"])
    run_pass(refresh_views, graph)
    assert storage(view.meta["val"]) == storage(cosine.meta["val"])
    assert view.meta["val"].shape == (12,)


(NOOPS,) = (each.run for each in pipeline.ON_ATEN if each.name == "noops")


def test_what_changes_nothing_goes_and_the_rest_stays():
    graph = aten_graph(lambda x: x.sin()[:9, 0:].contiguous()[1:].clone().cos(), torch.empty(9, 4))
    run_pass(NOOPS, graph)
    left = [n.target for n in graph.nodes if n.op == "call_function"]
    assert left == [aten.sin.default, aten.slice.Tensor, aten.cos.default]  # [1:]


def permute(x, dims=(1, 0)):
    return torch.ops.aten.permute.default(x, list(dims))


TRANSPOSED = {
    "twice": (lambda a, b: (permute(permute(a @ b)).float(),), 0),
    "read between": (lambda a, b: (permute(once := permute(a @ b)).float(), once), 1),
    "no product": (lambda a, b: (permute(permute((a @ b).sin())) * 2,), 2),
    "three dimensions": (lambda a, b: (permute((a @ b).unsqueeze(0), [1, 2, 0]) * 2,), 1),
}


@pytest.mark.parametrize(("function", "left"), TRANSPOSED.values(), ids=TRANSPOSED)
def test_a_product_that_is_transposed_twice_is_read_as_it_is(function, left):
    a, b = randn(6, 4).double(), randn(4, 5).double()
    graph = aten_graph(function, a, b)
    run_pass(NOOPS, graph)
    permutes = graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default)
    assert len(permutes) == left
    have, want = torch.fx.GraphModule({}, graph)(a, b), function(a, b)
    torch.testing.assert_close(have, want, rtol=0, atol=0, check_stride=True)
