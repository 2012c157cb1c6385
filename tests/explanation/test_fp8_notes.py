# SPDX-License-Identifier: Apache-2.0
"""What an explanation notes of FP8: layers that names skip, and products that are scaled."""

from __future__ import annotations

import re

import float8
import torch
from torch import nn

from coda_inductor import explain


def batch():
    return torch.randn(2, 16, float8.D, dtype=torch.bfloat16, requires_grad=True)


def notes(model, **options) -> str:
    """Of a training step, as if there were kernels."""
    found = explain(model, batch(), options={"gate": "always", **options})
    assert found.gemms_fused > 0
    return " ".join(found.notes)


class Halves(nn.Module):
    """Two graphs: each has layers that the other one has not."""

    def __init__(self):
        super().__init__()
        self.first = float8.Stack().bfloat16()
        self.second = nn.Linear(float8.D, float8.D).bfloat16()

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


def test_names_of_no_layer_are_said_for_the_whole_call():
    """A name of a layer in another graph is no mistake."""
    text = notes(Halves(), fp8="rowwise", fp8_small=True, fp8_skip=["second", "gate", "dwn", "x"])
    assert "FP8 (rowwise): 2 of 4 linear layers; fp8_skip: 'dwn', 'x' name none of them." in text
    assert "FP8" not in notes(Halves())


def test_of_inference_where_every_product_is_scaled():
    """The GEMMs of a graph are counted as it was traced, for what the gate would decide."""
    found = []
    for model in (float8.serve(float8.Stack(2).bfloat16(), "row"), float8.Stack(2).bfloat16()):
        with torch.no_grad():
            text = " ".join(explain(model, batch()).notes)
        found.append(re.search(r"too small: the graph's GEMMs take (\d+) us", text).group(1))
    assert 0 < int(found[0]) <= int(found[1])
