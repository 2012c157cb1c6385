# SPDX-License-Identifier: Apache-2.0
"""A call reads the same however it is written."""

import pytest
import torch
import torch.nn.functional as F

from coda_inductor.graph.read import read
from coda_inductor.semantic import rms_norm

aten = torch.ops.aten
DTYPE = torch.float16


def call(function):
    """The last call of ``function`` of two tensors, which is traced, as it is read."""
    graph = torch.fx.symbolic_trace(function).graph
    return read(list(graph.nodes)[-2])


SUM = ("sum", {"input": "x", "dim": -1, "keepdim": True})
ADD = ("add", {"input": "x", "other": "y", "alpha": 1})
VIEW = ("view", {"input": "x", "size": (2, -1)})
WHERE = ("where", {"input": "x", "condition": "y", "other": 0.0})
NORM = ("layer_norm", {"input": "x", "normalized_shape": (4,), "weight": "y", "eps": 1e-5})
SPELLINGS = [
    (lambda x, _: torch.sum(x, -1, True), SUM),
    (lambda x, _: x.sum(dim=-1, keepdim=True), SUM),
    (lambda x, _: aten.sum(x, [0]), ("sum", {"input": "x", "dim": [0], "keepdim": False})),
    (lambda x, y: x + y, ADD),
    (lambda x, y: aten.add.Tensor(x, y, alpha=1), ADD),
    (lambda x, _: torch.reshape(x, shape=(2, -1)), VIEW),
    (lambda x, _: aten.view.default(x, [2, -1]), ("view", {"input": "x", "size": [2, -1]})),
    (lambda x, _: x.view(DTYPE), ("view", {"input": "x", "dtype": DTYPE})),
    (lambda x, _: x.permute(0, 2, 1), ("permute", {"input": "x", "dims": (0, 2, 1)})),
    (lambda x, y: x.where(y, 0.0), WHERE),
    (lambda x, _: torch.split(x, split_size_or_sections=2, dim=-1),
     ("split", {"input": "x", "split_size": 2, "dim": -1})),
    (lambda x, y: F.layer_norm(x, (4,), y), NORM),
    (lambda x, y: rms_norm(x, y, 1e-6, DTYPE),
     ("torch._ops.coda_inductor.rms_norm.default",
      {"x": "x", "weight": "y", "eps": 1e-6, "out_dtype": DTYPE})),
]  # fmt: skip


@pytest.mark.parametrize(("function", "want"), SPELLINGS)
def test_arguments_by_name(function, want):
    found = call(function)
    args = torch.fx.node.map_arg({**found.args}, str)
    assert (found.op, {name: item for name, item in args.items() if item is not None}) == want


@pytest.mark.parametrize(("function", "name"), [
    (lambda x, _: x.var(False), "unbiased"),  # a bool is no dimension
    (lambda x, _: x.var(-1), "dim"),
    (lambda x, y: x.to(y), "other"),  # a tensor is no dtype
    (lambda x, _: x.to(DTYPE), "dtype"),
    (lambda x, _: x.to("cuda"), "device"),
])  # fmt: skip
def test_types_choose_between_overloads(function, name):
    given = call(function)
    assert [*given.args][1] == name
