# SPDX-License-Identifier: Apache-2.0
"""FP8 after fusing: unfused products get their scales as arguments, where cuBLAS supports that.

Before::

    p = scaled_mm(q, r, 1 / s, 1 / t, bfloat16, fast, after=True)    _scaled_mm(q, r, one, one)
                                                                     bfloat16(... * (1 / s * 1 / t))
After::

    p = scaled_mm(q, r, 1 / s, 1 / t, bfloat16, fast, after=False)   _scaled_mm(q, r, 1 / s, 1 / t)

Why it is valid: the same product, rounded once instead of twice. Why it pays: torchao multiplies
after the product because of a kernel that was slow with scales of rows. cuBLAS's kernel, for
bfloat16 only, takes 3 % longer with such scales than without (gotchas.md), and the multiplication
reads and writes the product once more.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from coda_inductor.graph.nodes import arguments, fake
from coda_inductor.graph.read import change
from coda_inductor.record import Record
from coda_inductor.semantic.fp8 import scaled_mm


def finish_fp8(graph: Graph, record: Record) -> None:
    """Apply the rewrite, in place, on GPUs whose products can be scaled by vectors."""
    for node in graph.find_nodes(op="call_function", target=scaled_mm):
        half = fake(node).dtype == torch.bfloat16
        later = arguments(node)["after"]
        if half and later and record.plan.scales_vectors(fake(node).device):
            change(node, after=False)
