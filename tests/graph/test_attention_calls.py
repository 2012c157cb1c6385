# SPDX-License-Identifier: Apache-2.0
"""Which implementation of attention a graph calls."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from coda_inductor.graph import attention
from coda_inductor.report import forget, reports

ATEN = torch.ops.aten


def graph_of(*targets) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    x = graph.placeholder("scaled_dot_product")
    for target in targets:
        x = graph.call_function(target, (x,))
    graph.output(x)
    return graph


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (ATEN._scaled_dot_product_cudnn_attention.default, "cuDNN"),
        (ATEN._scaled_dot_product_flash_attention.default, "FlashAttention"),
        (ATEN._scaled_dot_product_flash_attention_for_cpu.default, "FlashAttention"),
        (ATEN._scaled_dot_product_efficient_attention.default, "memory-efficient"),
        (ATEN._scaled_dot_product_fused_attention_overrideable.default, "the device's own"),
        (torch.ops.higher_order.flex_attention, "FlexAttention"),
    ],
)
def test_names(target, name):
    assert attention.calls(graph_of(target, ATEN.mul.Tensor, target)) == Counter({name: 2})


def test_the_backward_pass_has_the_same_name_and_is_not_counted():
    graph = graph_of(ATEN._scaled_dot_product_cudnn_attention_backward.default)
    assert attention.calls(graph) == Counter()
    names = [attention.implementation(node) for node in graph.nodes]
    assert names == [None, "cuDNN", None]


def test_a_compiled_graph_says_what_attention_runs_as():
    forget()
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="coda")
    compiled(q).sum().backward()
    assert reports()[-1].attention == Counter({"FlashAttention": 1})
