# SPDX-License-Identifier: Apache-2.0
"""Products that stayed unfused are given their scales, where cuBLAS multiplies with them.

Before::

    p = scaled_mm(q, r, 1 / s, 1 / t, bfloat16, fast, after=True)    _scaled_mm(q, r, one, one)
                                                                     bfloat16(... * (1 / s * 1 / t))
After::

    p = scaled_mm(q, r, 1 / s, 1 / t, bfloat16, fast, after=False)   _scaled_mm(q, r, 1 / s, 1 / t)

Why it is valid: the same product, rounded once instead of twice. Why it pays: torchao multiplies
afterwards for the sake of a kernel that was slow with scales of rows; cuBLAS's takes 3 % longer
with them than without (docs/gotchas.md), the multiplication reads and writes the product once more.

Leaves alone what is not multiplied afterwards, and other dtypes than bfloat16, the only one that
cuBLAS has such a kernel for.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from coda_inductor.graph.gemms import multiplies_after
from coda_inductor.graph.nodes import fake
from coda_inductor.mainloop.availability import scales_vectors
from coda_inductor.record import Record
from coda_inductor.semantic.fp8 import scaled_mm


def scale_in_products(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every product, in place, where kernels run on a GPU that can."""
    if not record.policy.compiles:
        return
    for node in graph.find_nodes(op="call_function", target=scaled_mm):
        device = record.as_if or fake(node).device
        half = fake(node).dtype == torch.bfloat16
        if multiplies_after(node) and half and scales_vectors(device):
            node.update_arg(6, False)
