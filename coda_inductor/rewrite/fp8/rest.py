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

A cast by rows of a gradient of a frozen layer (``semantic.fp8``) becomes plain ops if no
epilogue took its maxima: one kernel of Inductor's then computes gradient, maxima and cast.
"""

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import replace_parts
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.read import change
from coda_inductor.graph.sizes import same
from coda_inductor.graph.splice import splice
from coda_inductor.graph.walk import closure
from coda_inductor.record import Record
from coda_inductor.semantic.fp8 import scaled_mm
from coda_inductor.semantic.fp8_casts import CAST, fp8_cast


def finish_fp8(graph: Graph, record: Record) -> None:
    """Apply the rewrite, in place, on GPUs whose products can be scaled by vectors."""
    for node in graph.find_nodes(op="call_function", target=scaled_mm):
        half = fake(node).dtype == torch.bfloat16
        later = arguments(node)["after"]
        if half and later and record.plan.scales_vectors(fake(node).device):
            change(node, after=False)
    for node in graph.find_nodes(op="call_function", target=CAST):
        args = arguments(node)
        plain = not args["divide"] and args["factor"] is None and args["scale_t"] is None
        if plain and args["weight"] is not None and _reads_maxima(args["scale"], args["x"]):
            replace_parts(node, splice(node, fp8_cast, node.args))


def _reads_maxima(scale: Node, x: Node) -> bool:
    """Is ``scale`` computed from maxima that a pass over ``x`` itself computes?"""
    small = closure([scale], lambda n: [] if n.target is aten.amax.default else n.all_input_nodes)
    reduced = [n.all_input_nodes[0] for n in small if n.target is aten.amax.default]
    return any(same(fake(wide).shape, fake(x).shape) for wide in reduced)
