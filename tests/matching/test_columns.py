# SPDX-License-Identifier: Apache-2.0
"""Columns of a tensor are known by what is recorded of them, however they are selected; rows,
copies and other views are no columns."""

import pytest
import torch

from coda_inductor.matching import normalize

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
