# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over grouped products becomes the ops of ``semantic.experts``.

Before (x (T, d), ids (T, k), w (T, k), W13 (E, 2f, d), W2 (E, d, f))::

    _, perm = torch.sort(ids.reshape(-1))                 # or argsort
    offs = torch.cumsum(torch.histc(ids, E, 0, E - 1), 0, dtype=torch.int32)    # or bincount
    g, u = grouped_mm(x[perm // k], W13.mT, offs=offs).chunk(2, -1)
    y = grouped_mm(silu(g) * u, W2.mT, offs=offs) * w.reshape(-1)[perm, None]
    out = y[perm.argsort()].view(T, k, d).sum(1)          # or scatter_add, index_add, bmm

After::

    rows, perm, inverse, offs = route(ids.reshape(-1), E, k)
    g, u = experts_up(x, rows, inverse, offs, [W13.mT], 2)
    out = experts_down(silu(g) * u, w, rows, perm, inverse, offs, W2.mT, k)

Why it is valid: an order of equal ids is the sort's own choice, and all that reads ``perm`` reads
the new one; rows of a product are those of its left factor; a weight of a row may be applied
before or after a product, and before or after the rows are put back.

Each of the three stands alone: what is between them may be anything. A product whose rows are no
such gather (they were weighted before, or came from other ranks), or whose sum is none, is
``experts_up`` of rows that lie in order. Leaves alone: products with a bias of their own; what is
changed in place between, with a reason.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.dynamo.nodes import Put, erase
from coda_inductor.dynamo.packed import cut_in_columns, cut_in_halves
from coda_inductor.dynamo.summed_pairs import Pairs, by_row, summed
from coda_inductor.graph.nodes import erased, place
from coda_inductor.graph.read import Call, read, target_name
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, chain, closure
from coda_inductor.matching import Hazards, bodies, is_cast, memory, mutates, value
from coda_inductor.matching.guards import written
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.semantic.experts import ROUTE, experts_down, experts_up, group_rows

#: Of torch, and of transformers where it does not ask torch for them.
_PRODUCTS = ("_grouped_mm", "grouped_mm", "torch._ops.transformers.grouped_mm_fallback")
#: What may come before a weight that is made of parameters.
_MADE = ("transpose", "getattr", "to", "bfloat16", "half", "float", "permute", "contiguous",
         "type_as")  # fmt: skip


def raise_experts(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its regions, in place; counts each block of experts."""
    for body in bodies(graph):
        products = [node for node in body.graph.nodes if target_name(node) in _PRODUCTS]
        if not products:
            for node in filter(_loops, body.graph.nodes):
                text = "a Python loop over experts breaks the graph: each runs by itself"
                record.refuse("experts", place(node), refuse("experts-loop", text))
            continue
        hazards = Hazards(body.graph)
        routed: list[_Routed] = []
        for node in products:
            if node.users and (found := _rows_of(node)) is not None:
                own = found[-1]
                hazards.writes = [w for w in hazards.writes if not own.empties(w)]
                whole = any(summed(p, own) for p in products if _ends(p) is _ends(node))
                _raise_up(found, routed, hazards, record, whole=whole)
        for node in products:
            if not erased(node):
                _raise_down(node, routed, hazards, record)
        offsets = {ends: own.offsets for own in routed for ends in own.pairs.offs}
        for node in products:
            if not erased(node) and node.users:
                _raise_alone(node, offsets, hazards)


def _loops(node: Node) -> bool:
    """Is ``node`` a mask of pairs, which the graph leaves to a loop over the experts that have some
    (the ``eager`` ones of transformers)? It ends in the midst of ::

        mask = one_hot(ids, E).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero(): ...
    """
    if target_name(node) != "permute" or target_name(node.all_input_nodes[0]) != "one_hot":
        return False
    sums = [n for n in node.users if target_name(n) == "sum"]
    asked = [n for each in sums for n in each.users if target_name(n) == "greater"]
    return all(any(u.op == "output" for u in n.users) for n in (node, *asked)) and bool(asked)


class _Routed:
    """Pairs in the order of their experts: ``pairs`` as read, and the results of ``route``."""

    def __init__(self, pairs: Pairs, experts: int):
        self.pairs = pairs
        put = Put(pairs.perm)
        found = put(ROUTE, pairs.ids, experts, pairs.top_k)
        self.rows, self.perm, self.inverse, self.offsets = (
            put(operator.getitem, found, i) for i in range(4)
        )
        pairs.perm.replace_all_uses_with(put("to", self.perm, value(pairs.perm).dtype))
        pairs.perm = self.perm


def _operands(node: Node) -> tuple[Node, Node, Node] | None:
    """A, B and the ends of groups of a product without bias; None for another."""
    call = read(node)
    if call is None or any(call.get(name) is not None for name in ("bias", "out_dtype")):
        return None
    (a, b, *_), offs = call.args.values(), call.get("offs")
    known = [value(x) for x in (a, b, offs)]
    if not all(hasattr(x, "fake_mode") for x in known) or [x.dim() for x in known] != [2, 3, 1]:
        return None
    return a, b, offs


def _ends(product: Node) -> Node | None:
    """The ends of groups of a product."""
    operands = _operands(product)
    return None if operands is None else operands[2]


def _rows_of(product: Node) -> tuple[Node, Node, Node, Pairs] | None:
    """Of a product whose rows are gathered: itself, what they are gathered from, in the dtype of
    the product, the ends of groups, and the pairs."""
    if (operands := _operands(product)) is None:
        return None
    a, b, offs = operands
    gather = base(a, lambda n: is_cast(n) or target_name(n) in ("masked_fill", "masked_fill_"))
    call = read(gather)
    if call is None or (source := _gathered(call)) is None:
        return None
    x, index = source
    if value(x).dim() != 2 or (pairs := Pairs.of(index)) is None:
        return None
    counted = pairs.counted(offs, value(b).shape[0])
    between = [n for n in chain(a, lambda n: n is not gather) if not is_cast(n)][:-1]
    if not all(map(pairs.empties, between)):
        return None
    m = value(pairs.ids).shape[0]
    rows = same(value(x).shape[0] * pairs.top_k, m)
    rows = rows and same(value(a).shape, (m, value(x).shape[1]))
    return (product, gather, x, pairs) if counted and rows else None


def _gathered(call: Call) -> tuple[Node, Node] | None:
    """What rows are taken of, and which: x[i], index_select(x, 0, i), gather(x, 0, i of rows)."""
    index = call.get("index")
    if call.op == "getitem" and isinstance(index, Node):
        return call["input"], index
    if call.op in ("index_select", "gather") and call["dim"] in (0, -2):
        return (call["input"], index) if by_row(index, call.node) else None
    return None


def _raise_up(
    found: tuple[Node, Node, Node, Pairs],
    routed: list[_Routed],
    hazards: Hazards,
    record: Record,
    *,
    whole: bool,
) -> None:
    """Put ``experts_up`` in the place of a product, and of the next one of the same rows whose
    weight is like its own. ``whole``: what it becomes is summed by token, so that nobody reads rows
    of no expert."""
    product, gather, x, pairs = found
    a, b, offs = _operands(product)  # type: ignore[misc]
    if _changed({pairs.perm, offs}, hazards) or hazards.between((gather, product)):
        why = refuse("mutation", "memory or a mode changes between its sort and its product")
        record.refuse("experts", place(product), why)
        return
    own = next((r for r in routed if r.pairs.perm is pairs.perm), None)
    if own is None:
        own = _Routed(pairs, value(b).shape[0])
        routed.append(own)
    put = Put(product)
    x = x if value(x).dtype == value(a).dtype else put("to", x, value(a).dtype)
    for each in (product, *(n for n in a.users if _twin(n, product, a, offs, hazards))):
        _open_bias(each, own, offs, hazards, whole=whole)
    if whole:
        _unmask(product, pairs, offs)
    halves = cut_in_halves(product)
    twins = [] if halves else [n for n in a.users if _twin(n, product, a, offs, hazards)][:1]
    for twin in twins:
        _hoist(_operands(twin)[1], product)  # type: ignore[index]
    weights = [b, *(_operands(n)[1] for n in twins)]  # type: ignore[index]
    routes = own.rows, own.inverse, own.offsets
    made = put(experts_up, x, *routes, weights, pairs.top_k, 2 if halves else 1)
    _take_parts(put, made, halves or {node: i for i, node in enumerate((product, *twins))})
    own.pairs.offs.add(offs)


def _take_parts(put: Put, made: Node, places: dict[Node, int]) -> None:
    """Let the results of ``made`` take the places of nodes."""
    parts = [put(operator.getitem, made, i) for i in places.values()]
    for node, part in zip(places, parts, strict=True):
        node.replace_all_uses_with(part)
        erase(node)


def _unmask(node: Node, pairs: Pairs, ends: Node) -> None:
    """Let who reads ``node`` with zeros in rows of no expert, which nobody sees, read it."""
    for user in [u for u in node.users if pairs.empties(u) and _hidden(u, ends)]:
        user.replace_all_uses_with(node)
        erase(user)


def _open_bias(product: Node, own: _Routed, ends: Node, hazards: Hazards, *, whole: bool) -> None:
    """A bias of each expert that is added to ``product`` is added to what is taken of its columns,
    as rows of its groups: where a gate reads both, they are of one tile. ``whole`` as
    :func:`_raise_up` takes it."""
    call = read(next(iter(product.users))) if len(product.users) == 1 else None
    if call is None or call.op != "add" or call.get("alpha") not in (None, 1):
        return
    total, rows = call.node, call["other"] if call["input"] is product else call["input"]
    found = own.pairs.bias(rows)
    if found is None or not own.offsets < rows:
        return
    if whole:
        _unmask(total, own.pairs, ends)
    taken = cut_in_columns(total)
    if _changed({product, total}, hazards) or hazards.between((product, total, *taken)):
        return
    early = Put(rows)
    for node, columns in (taken or {total: slice(None)}).items():
        put, which = Put(node), (slice(None), columns)
        part, bias = product, found[0]
        if taken:
            part, bias = put(operator.getitem, part, which), early(operator.getitem, bias, which)
        new = put(operator.add, part, early(group_rows, bias, found[1], own.offsets))
        node.replace_all_uses_with(new)
        erase(node)


def _hidden(node: Node, ends: Node) -> bool:
    """Is all that is made of ``node`` multiplied by the same grouping, which skips rows of no
    expert?"""

    def readers(each: Node) -> list[Node]:
        multiplied = target_name(each) in _PRODUCTS and _ends(each) is ends
        return [] if multiplied else list(each.users)

    found = closure([node], readers)
    return not any(each.op == "output" or mutates(each) for each in found)


def _changed(nodes: set[Node], hazards: Hazards) -> bool:
    """Is one of the tensors ``nodes`` changed in place anywhere? Other results of what made it may
    be: a sort's values."""
    own = {place for node in nodes for place in memory(node) or ()}
    changed = {n for w in hazards.writes for n in written(w) if isinstance(value(n), Tensor)}
    return any(not own.isdisjoint(memory(n) or ()) for n in changed - {*hazards.writes})


def _raise_alone(node: Node, offsets: dict[Node, Node], hazards: Hazards) -> None:
    """Put ``experts_up`` in the place of a product of rows that lie in order. ``offsets``: of the
    ends of groups, which have a zero in front there."""
    operands = _operands(node)
    if operands is None or value(operands[2]).dtype != torch.int32:
        return
    a, b, ends = operands
    if not value(a).is_floating_point() or value(a).dtype != value(b).dtype:
        return
    if _changed({ends}, hazards):
        return
    put = Put(node)
    if ends not in offsets:
        offsets[ends] = put(F.pad, ends, (1, 0))
    halves = cut_in_halves(node)
    made = put(experts_up, a, None, None, offsets[ends], [b], 1, 2 if halves else 1)
    _take_parts(put, made, halves or {node: 0})


def _of_biases(put: Put, bias: Node, w: Node | None, pairs: Pairs) -> Node:
    """The sum over the pairs of each token of their ``bias`` (E, d), weighted: (T, d), and nothing
    of pairs of no expert."""
    ids = put("view", pairs.ids, -1, pairs.top_k)
    none = put(operator.ge, ids, pairs.experts)
    weights = put("to", put("logical_not", none), value(bias).dtype)
    if w is not None:
        weights = put(operator.mul, weights, put("to", w, value(bias).dtype))
    rows = put(operator.getitem, bias, put("masked_fill", ids, none, 0))
    return put("squeeze", put(torch.bmm, put("unsqueeze", weights, 1), rows), 1)


def _twin(node: Node, product: Node, a: Node, offs: Node, hazards: Hazards) -> bool:
    """Is ``node`` another product of the same rows, whose weight can be had before ``product``?"""
    if node is product or node < product or target_name(node) not in _PRODUCTS:
        return False
    operands, own = _operands(node), _operands(product)
    if operands is None or own is None or operands[0] is not a or operands[2] is not offs:
        return False
    w, mine = value(operands[1]), value(own[1])
    alike = same(w.shape, mine.shape) and same(w.stride(), mine.stride()) and w.dtype == mine.dtype
    source = base(operands[1], lambda n: n > product and target_name(n) in _MADE)
    return alike and source < product and not hazards.between((product, node))


def _hoist(node: Node, before: Node) -> None:
    """Move ``node``, and what it is made of, in front of ``before``."""
    if node < before:
        return
    for each in node.all_input_nodes:
        _hoist(each, before)
    before.prepend(node)


def _raise_down(node: Node, routed: list[_Routed], hazards: Hazards, record: Record) -> None:
    """Put ``experts_down`` in the place of a product of sorted rows and of their sum by token."""
    operands = _operands(node)
    own = next((r for r in routed if operands and operands[2] in r.pairs.offs), None)
    if own is None or operands is None:
        return
    a, b, _ = operands
    sum_ = summed(node, own.pairs)
    if sum_ is None:
        text = "the sum of its rows by token is none that is known"
        record.refuse("experts", place(node), refuse("experts-sum", text))
        return
    kept = [n for n in (sum_.weights, sum_.onto) if n is not None and n.op != "placeholder"]
    if hazards.between((node, *kept), sum_.result):
        why = refuse("mutation", "memory or a mode changes between its product and its sum")
        record.refuse("experts", place(node), why)
        return
    put = Put(sum_.result)
    w = sum_.weights
    if w is not None and value(w).dim() != 2:
        w = put("view", w, -1, own.pairs.top_k)
    routes = own.rows, own.perm, own.inverse, own.offsets
    dtype = value(sum_.result).dtype
    out = put(experts_down, a, w, *routes, b, own.pairs.top_k, dtype)
    if sum_.bias is not None:
        out = put(operator.add, out, _of_biases(put, sum_.bias, w, own.pairs))
    if value(out).dtype != dtype:
        out = put("to", out, dtype)
    if sum_.onto is not None:
        out = put(operator.add, sum_.onto, out)
    if not same(value(out).shape, value(sum_.result).shape):
        out = put("reshape", out, value(sum_.result).shape)
    sum_.result.replace_all_uses_with(out)
    erase(sum_.result)
    record.fire("experts")
