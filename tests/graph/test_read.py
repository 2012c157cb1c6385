# SPDX-License-Identifier: Apache-2.0
"""A call reads the same however it is written; columns of a tensor are known however they are
selected, and rows, copies and other views are none."""

import pytest
import torch
import torch.nn.functional as F

from coda_inductor.graph.read import read
from coda_inductor.matching import normalize
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
NORM = ("rms_norm", {"input": "x", "normalized_shape": (4,), "weight": "y"})
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
    (lambda x, y: F.rms_norm(x, (4,), y), NORM),
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


COLUMNS = {
    "slice": (lambda x: x[..., :3], (0, 3, 1)),
    "to the end": (lambda x: x[:, -3:], (3, None, 1)),
    "every other": (lambda x: x[:, 1::2], (1, None, 2)),
    "split": (lambda x: x.split([1, 3, 2], -1)[1], (1, 4, 1)),
    "unbind": (lambda x: x.view(4, 2, 3).unbind(1)[1], (3, None, 1)),
    "index": (lambda x: x.unflatten(-1, (3, 2))[..., 0], (0, None, 2)),
    "transposed": (lambda x: x.view(6, 4).t()[:, 1:3], (1, 3, 1)),
}
OTHERS = {
    "rows": lambda x: x[:1, :3],
    "rows of a view": lambda x: x.view(6, 4)[:4],
    "gathered rows": lambda x: x[torch.tensor([1, 0, 3, 2])],
    "a row": lambda x: x[0],
    "a new dimension": lambda x: x[True],
    "bits": lambda x: x.view(torch.int16).view(8, 6)[:4],
}


def last(function):
    """The last op of ``function`` as the matcher reads it, and the input's node."""
    found = []

    def backend(gm, _inputs):
        found.append((normalize(gm.graph.output_node().args[0][0]), next(iter(gm.graph.nodes))))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.zeros(4, 6))
    return found[0]


@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name):
    function, expected = COLUMNS[name]
    call, x = last(function)
    assert (call.op, call["start"], call["stop"], call["step"]) == ("columns", *expected)
    assert call["input"] is x or name == "transposed"


@pytest.mark.parametrize("name", OTHERS)
def test_no_columns_of_the_input(name):
    call, x = last(OTHERS[name])
    assert call is None or call.get("input") is not x
