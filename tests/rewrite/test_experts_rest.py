# SPDX-License-Identifier: Apache-2.0
"""Experts that no epilogue took are multiplied as the user wrote it: one product a weight."""

from __future__ import annotations

import pytest
import torch
from passes import aten_graph, run_pass

from coda_inductor.rewrite.experts import finish_experts
from coda_inductor.semantic.experts import grouped_mm

aten = torch.ops.aten
A, D, W = (5, 16), (5, 8), (3, 16, 16)


def offsets():
    return torch.tensor([0, 2, 2, 5], dtype=torch.int32)


def left(function, *shapes) -> int:
    """How many grouped products are left of a function of tensors and the offsets of groups."""
    graph = aten_graph(function, *(torch.randn(s).double() for s in shapes), offsets())
    run_pass(finish_experts, graph)
    return sum(n.target is grouped_mm for n in graph.nodes)


def halves_of(x, y, w, groups):
    lower, upper = torch.split(w, 8, 2)
    return grouped_mm(x, lower, groups, None) * grouped_mm(y, upper, groups, None)


def test_products_of_several_rows_stay_apart():
    assert left(lambda x, w, o: halves_of(x, x, w, o), A, W) == 1
    assert left(halves_of, A, A, W) == 2


def test_one_part_alone_stays():
    def one(x, w, groups):
        return grouped_mm(x, torch.split(w, 8, 2)[0], groups, None)

    assert left(one, A, W) == 1


def summed(order, x, y, w, groups):
    parts = [part.permute(0, 2, 1) for part in torch.split(w, 8, 2)]
    first, second = (
        grouped_mm(a, parts[i], groups, None) for a, i in zip((x, y), order, strict=True)
    )
    return first + second


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_sum_over_both_parts_is_one_product_in_either_order(order):
    given = [torch.randn(s).double() for s in (D, D, W)]
    graph = aten_graph(lambda *args: summed(order, *args), *given, offsets())
    before = torch.fx.GraphModule({}, graph)(*given, offsets())
    run_pass(finish_experts, graph)
    assert sum(n.target is grouped_mm for n in graph.nodes) == 1
    torch.testing.assert_close(torch.fx.GraphModule({}, graph)(*given, offsets()), before)


def test_twice_the_same_part_stays():
    assert left(lambda x, y, w, o: summed((0, 0), x, y, w, o), D, D, W) == 2


def two_of_four(x, y, w, groups):
    first, second, *others = (part.permute(0, 2, 1) for part in torch.split(w, 4, 2))
    both = grouped_mm(x, first, groups, None) + grouped_mm(y, second, groups, None)
    return both, *others


def of_two_groupings(x, y, w, groups):
    first, second = (part.permute(0, 2, 1) for part in torch.split(w, 8, 2))
    return grouped_mm(x, first, groups, None) + grouped_mm(y, second, groups.clone(), None)


@pytest.mark.parametrize(("function", "width"), [(two_of_four, 4), (of_two_groupings, 8)])
def test_a_sum_of_other_products_stays(function, width):
    assert left(function, (5, width), (5, width), W) == 2
