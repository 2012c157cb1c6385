# SPDX-License-Identifier: Apache-2.0
"""A weight's gradient that is turned twice is not turned at all.

Before (what autograd makes of a linear layer, here with a float32 weight under autocast)::

    dWt = mm(dz.T, x); dW = permute(permute(dWt)); float(dW)

After::

    dWt = mm(dz.T, x); float(dWt)

Why it is valid: the two exchange the same dimensions. Why it pays: what follows, the cast to the
weight's dtype above all, lies on the tile, and the product leaves the kernel in float32.
"""

from __future__ import annotations

from torch.fx import Graph

from coda_inductor.graph.gemms import GEMMS
from coda_inductor.graph.nodes import aten, is_transpose
from coda_inductor.record import Record


def turn_back(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to every product, in place."""
    for back in graph.find_nodes(op="call_function", target=aten.permute.default):
        there = back.args[0]
        if not (is_transpose(back) and is_transpose(there)):
            continue
        product = there.args[0]
        if product.target in GEMMS:
            back.replace_all_uses_with(product)
            graph.erase_node(back)
            if not there.users:
                graph.erase_node(there)
