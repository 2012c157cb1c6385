# SPDX-License-Identifier: Apache-2.0
"""A packed projection whose two halves are combined (Phi-3's ``gate_up_proj``) becomes two
projections with the halves of its weight, which the fuser then pairs in one tile (rule R6).

Before (W (2F, K))::

    z = linear(x, W)
    g, u = z.view(..., 2, F).unbind(-2)         # also chunk, split, slices
    a = silu(g) * u                             # or F.glu(z) alone

After::

    lower, upper = W.chunk(2)
    g, u = linear(x, lower), linear(x, upper)
    a = silu(g) * u

Why it is valid: each column of a product depends on one column of its right factor; a gated linear
unit is ``g * sigmoid(u)`` (Dauphin et al., arXiv 1612.08083, eq. 1). The halves of a weight are
views of it, so nothing is copied. Autograd joins the weight's gradient by a copy, whose cost
``Plan.split_loses`` includes.

Leaves alone: products of unknown or odd width; a single half; halves that are changed in place or
are graph outputs (autograd forbids in-place changes of results of ``chunk``); halves with an
in-place or a mode change between them; products with other readers or more than two parts; halves
that no elementwise op combines, or whose memory is seen; weights that are not K-major, or wrapped.
"""

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.layout import seen
from coda_inductor.graph.nodes import arguments, fake, plain
from coda_inductor.graph.read import kind, op_name
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import closure, readers
from coda_inductor.matching import Hazards, bodies, move, normalize, replace
from coda_inductor.matching.normalize import is_last
from coda_inductor.program.dtypes import FLOATS
from coda_inductor.record import Record

if TYPE_CHECKING:
    from coda_inductor.sites import Sites

#: Kinds of ops that may be between a product and its halves.
_BETWEEN = ("names", "parts")


def split_packed(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its regions, in place. Only pairs in one tile count."""
    sites = None
    for body in bodies(graph):
        named = [n for n in body.graph.nodes if op_name(n) == "linear"]
        products = [n for n in named if _even(n) and (_units(n) or _halves(n))]
        if not products:
            continue
        sites, hazards = sites or _sites(graph, record), Hazards(body.graph)
        for product in products:
            if hazards.private([product]):
                _rewrite(product, sites, hazards, record)


def _sites(graph: Graph, record: Record) -> "Sites":
    """Sites under the plan of the later aten graph, as far as this graph's linear layers tell."""
    linears = [n for body in bodies(graph) for n in body.graph.nodes if op_name(n) == "linear"]
    pairs = [pair for node in linears if (pair := _operands(node)) is not None]
    training = any(fake(node).requires_grad for node in linears)
    times = 3 if training else 1  # two more products for the gradients of a layer's factors
    return record.sites.for_products(pairs * times, training=training)


def _even(product: Node) -> bool:
    """Does ``product``, (..., 2F), have an even number of columns?"""
    if not (tensors := plain(product)) or not tensors[0].dim():
        return False
    width = tensors[0].shape[-1]
    return isinstance(width, int) and width > 0 and width % 2 == 0


def _operands(node: Node) -> tuple[Tensor, Tensor] | None:
    """(M, K) and (K, N) of a linear layer, in its compute dtype; None if not plain tensors."""
    tensors = plain(node, *_layer(node)[:2])
    if tensors is None or tensors[2].dim() != 2:
        return None
    with tensors[0].fake_mode, torch.no_grad():
        x, w = (t.to(tensors[0].dtype) for t in tensors[1:])
        return x.reshape(-1, x.shape[-1]), w.t()


def _layer(node: Node) -> tuple[Any, ...]:
    return tuple(arguments(node)[name] for name in ("input", "weight", "bias"))


def _halves(product: Node) -> dict[Node, int]:
    """The nodes that select the lower (0) or upper (1) half of the columns, if both do occur."""
    half = fake(product).shape[-1] // 2
    ends = {(0, half, 1): 0, (half, None, 1): 1}
    halves = {n: ends[span] for n, span in _columns(product).items() if span in ends}
    return halves if len(set(halves.values())) == 2 else {}


def _columns(product: Node) -> dict[Node, tuple[Any, ...]]:
    """The nodes that select columns of ``product``, each with (start, stop, step)."""
    calls = [call for n in _near(product) if (call := normalize(n)) and call.op == "columns"]
    return {c.node: (c["start"], c["stop"], c["step"]) for c in calls if c["input"] is product}


def half_readers(product: Node) -> dict[Node, int]:
    """The nodes that select a half of the columns, with its number, if all readers do so."""
    return _if_complete(product, _halves(product) if _even(product) else {})


def column_readers(product: Node) -> dict[Node, slice]:
    """The nodes that select columns of ``product``, with slices; empty unless all readers do so."""
    return {node: slice(*span) for node, span in _if_complete(product, _columns(product)).items()}


def _if_complete(product: Node, parts: dict[Node, Any]) -> dict[Node, Any]:
    """``parts``, if other readers of ``product`` need only its size, and nobody sees that they lie
    in its memory; else empty."""
    others = [n for n in _near(product) if n not in parts and op_name(n) != "size"]
    apart = all(n.users and kind(n) in _BETWEEN for n in others)
    return parts if apart and seen(parts) is None else {}


def _near(product: Node) -> list[Node]:
    views, users = readers(product, lambda n: kind(n) in _BETWEEN)
    return [*views[1:], *users]


def _units(product: Node) -> list[Node]:
    """The gated linear units (``F.glu``) that read the columns of ``product``."""
    units = [node for node in product.users if op_name(node) == "glu"]
    return [node for node in units if is_last(arguments(node)["dim"], product)]


def _rewrite(product: Node, sites: "Sites", hazards: Hazards, record: Record) -> None:
    for unit in _units(product):
        _expand(product, unit)
    halves = _halves(product)
    safe = halves and not hazards.between((product, *halves))
    if not safe or not _splits(product, halves, sites, record):
        return
    put, dtype = Put(product), fake(product).dtype
    # Cast once, where autocast would cast each half.
    x, *factors = (put.cast(node, dtype) for node in _layer(product) if node is not None)
    pairs = [_chunk(put, node, 0) for node in factors]
    parts = [put(F.linear, x, *half) for half in zip(*pairs, strict=True)]
    for node, index in halves.items():
        move(node, parts[index])


def _splits(product: Node, halves: dict[Node, int], sites: "Sites", record: Record) -> bool:
    if (pair := _operands(product)) is None or fake(product).dtype not in FLOATS:
        return False
    if not same(pair[1].stride(0), 1) or not _meet(halves):
        return False
    why = seen(halves)
    if why is None and not _if_complete(product, halves):
        return False
    training = fake(product).requires_grad and fake(_layer(product)[1]).requires_grad
    why = why or sites.known(*pair).refusal or sites.plan.split_loses(pair[0], training)
    if why is not None:
        record.refuse("packed projection", product, why)
    return why is None


def _meet(halves: dict[Node, int]) -> bool:

    def reach(half: int) -> dict[Node, None]:
        nodes = [node for node, index in halves.items() if index == half]
        return closure(nodes, lambda n: filter(_elementwise, n.users))

    return not reach(0).keys().isdisjoint(reach(1))


def _elementwise(node: Node) -> bool:
    """Does ``node`` call an elementwise op (the aten op with its normalized name)?"""
    call = normalize(node)
    name = op_name(node) if call is None else call.op
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
    return name == "cast" or any(torch.Tag.pointwise in op.tags for op in overloads)


def _chunk(put: Put, node: Node, dim: int) -> list[Node]:
    parts = put(torch.chunk, node, 2, dim)
    return [put(operator.getitem, parts, i) for i in range(2)]


def _expand(product: Node, unit: Node) -> None:
    """Write out a gated linear unit as elementwise ops, unless that changes the result's layout."""
    with fake(product).fake_mode:
        lower, upper = fake(product).chunk(2, -1)
        if not same((lower * torch.sigmoid(upper)).stride(), fake(unit).stride()):
            return
    put = Put(unit)
    gate = _chunk(put, product, -1)
    replace(unit, put(operator.mul, gate[0], put(torch.sigmoid, gate[1])))
