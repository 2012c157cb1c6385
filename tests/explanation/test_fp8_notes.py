# SPDX-License-Identifier: Apache-2.0
"""What an explanation notes of FP8: products that are scaled."""

from __future__ import annotations

import re

import float8
import torch

from coda_inductor import explain


def batch():
    return torch.randn(2, 16, float8.D, dtype=torch.bfloat16, requires_grad=True)


def test_of_inference_where_every_product_is_scaled():
    """The GEMMs of a graph are counted as it was traced, for what the gate would decide."""
    found = []
    for model in (float8.serve(float8.Stack(2).bfloat16(), "row"), float8.Stack(2).bfloat16()):
        with torch.no_grad():
            text = " ".join(explain(model, batch()).notes)
        found.append(re.search(r"too small: the graph's GEMMs take (\d+) us", text).group(1))
    assert 0 < int(found[0]) <= int(found[1])
