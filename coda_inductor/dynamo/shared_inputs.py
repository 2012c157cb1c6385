# SPDX-License-Identifier: Apache-2.0
"""Low-rank linear layers that read one input (LoRA's ``A`` of q, k and v, of gate and up) become
one.

Before (A_i (r_i, K))::

    h = linear(x, A_0);  g = linear(x, A_1)

After::

    h, g = linear(x, cat([A_0, A_1])).split([r_0, r_1], -1)

Why it is valid: a product's columns are those of its right factor, one by one.

Why it pays: each of them, and each of their gradients, takes as long as reading x. Their gradients
of x become one product too.

Leaves alone: layers with a bias; weights that are computed in the graph; more than ``MOST`` columns
in total; few rows; results that are changed in place or are graph outputs; in-place or mode changes
between the layers.
"""

from __future__ import annotations

from collections import defaultdict
from operator import getitem

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import LOW_RANK as MOST
from coda_inductor.graph.gemms import LOW_RANK_RATIO
from coda_inductor.graph.nodes import arguments, fake, plain
from coda_inductor.graph.read import op_name
from coda_inductor.graph.sizes import hint
from coda_inductor.matching import Hazards, bodies
from coda_inductor.record import Record

#: The least number of rows of x: reading fewer is faster than starting a kernel.
LEAST = 1024


def share_inputs(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    for body in bodies(graph):
        found: dict[object, list[Node]] = defaultdict(list)
        for node in body.graph.nodes:
            if op_name(node) == "linear" and _small(node):
                weight = fake(arguments(node)["weight"])
                alike = weight.dtype, weight.device, fake(node).dtype
                found[arguments(node)["input"], alike].append(node)
        groups = [nodes for nodes in found.values() if len(nodes) > 1 and _fit(nodes)]
        hazards = Hazards(body.graph) if groups else None
        for nodes in groups:
            if hazards is not None and hazards.owned(nodes) and not hazards.between(nodes):
                _merge(nodes)


def _small(node: Node) -> bool:
    """Is ``node`` a low-rank layer whose weight is a graph input?"""
    layer = arguments(node)
    x, weight = layer["input"], layer["weight"]
    known = plain(weight, x, node)
    if layer["bias"] is not None or weight.op not in ("placeholder", "get_attr"):
        return False
    if known is None or known[0].dim() != 2:
        return False
    rank, width = map(hint, known[0].shape)
    return rank > 0 and hint(fake(x).numel()) >= LEAST * width and LOW_RANK_RATIO * rank <= width


def _fit(nodes: list[Node]) -> bool:
    """Are all of ``nodes`` together of low rank?"""
    weights = [fake(arguments(node)["weight"]) for node in nodes]
    rank, width = sum(hint(w.shape[0]) for w in weights), hint(weights[0].shape[1])
    return rank <= MOST and LOW_RANK_RATIO * rank <= width


def _merge(nodes: list[Node]) -> None:
    """Insert one layer before the first of ``nodes`` and let it replace all of them."""
    put = Put(nodes[0])
    weights = [arguments(node)["weight"] for node in nodes]
    product = put(F.linear, arguments(nodes[0])["input"], put(torch.cat, weights))
    cut = put(torch.split, product, [fake(w).shape[0] for w in weights], -1)
    parts = [put(getitem, cut, i) for i in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        node.graph.erase_node(node)
