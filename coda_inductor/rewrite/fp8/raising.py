# SPDX-License-Identifier: Apache-2.0
"""torchao's FP8, in a joint graph or one for inference, becomes two semantic ops
(``semantic.fp8``).

Before (one Linear, forward)::

    m = amax(abs(x)); s = float32(448 / max(float64(m), eps)); q = float8(clamp(x * s)); ... of W
    y = _scaled_mm(q, r, 1 / s, 1 / t, None, None, bfloat16, True)

After::

    q, s = quantize(x, [1], float8_e4m3fn, True); r, t = quantize(W, [1], ...)
    y = scaled_mm(q, r.t(), 1 / s, 1 / t, bfloat16, True, False)

Valid because the ops are defined as these very chains: decomposed, they are what was there, bit for
bit. Equal quantizations become one (``merge``); copies that only change a factor's layout go, and
come back with the decomposition (``products``).

Refuses what it does not know: a cast to FP8 by another chain (a maximum over all ranks; bounds for
it; a scale that is given), whose product is raised all the same; a product with a scale for its
result.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from coda_inductor.compat import scaled_mm as aten_scaled_mm
from coda_inductor.graph.collectives import behind
from coda_inductor.graph.nodes import aten, fake, place
from coda_inductor.graph.walk import base
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.fp8.chains import Chain, casts_to_fp8, chain_of
from coda_inductor.rewrite.fp8.merge import Quantized, merge
from coda_inductor.rewrite.fp8.products import product_of, raise_product

_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


def raise_fp8(graph: Graph, record: Record) -> None:
    """Apply the rewrite, in place, where there is a scaled product at all."""
    if not _products(graph):
        return
    known: dict[Node, Quantized] = {}
    if record.enabled("fp8_quantize"):
        known = merge(graph, _chains(graph, record))
        record.fire("fp8_quantize", len(known))
    for node in _products(graph) if record.enabled("fp8_product") else ():
        found = product_of(node)
        if isinstance(found, Refusal):
            record.refuse("fp8", place(node), found)
        else:
            raise_product(graph, found, known)
            record.fire("fp8_product")
    graph.eliminate_dead_code()


def _products(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=aten_scaled_mm))


def _chains(graph: Graph, record: Record) -> list[Chain]:
    found = []
    for cast in [n for n in graph.nodes if n.op == "call_function" and casts_to_fp8(n)]:
        if (chain := chain_of(cast)) is not None:
            found.append(chain)
        else:
            record.refuse("fp8", place(cast), _stays(cast))
    return found


def _stays(cast: Node) -> Refusal:
    """Why ``cast``, to FP8, is none that the pass knows."""
    scaled = base(cast.args[0], lambda n: n.target in _CLAMPS)
    numbers = [x for x in scaled.all_input_nodes if fake(x).dim() == 0]
    collective = next((c for x in numbers if (c := behind(x)) is not None), None)
    if collective is not None:
        text = f"{cast.name} casts to FP8 by a maximum over all ranks ({collective.name})"
        return refuse("fp8-ranks", text)
    text = f"{cast.name} casts to FP8, and not as torchao's dynamic scaling does"
    return refuse("fp8-cast", text)
