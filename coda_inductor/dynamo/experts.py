# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over grouped products becomes the ops of ``semantic.experts``.

Before (x (T, d), ids (T, k), w (T, k), W13 (E, 2f, d), W2 (E, d, f))::

    _, perm = torch.sort(ids.reshape(-1))                 # or argsort
    offs = torch.cumsum(torch.histc(ids, E, 0, E - 1), 0, dtype=torch.int32)
    g, u = grouped_mm(x[perm // k], W13.mT, offs=offs).chunk(2, -1)
    y = grouped_mm(silu(g) * u, W2.mT, offs=offs) * w.reshape(-1)[perm, None]
    out = y[perm.argsort()].view(T, k, d).sum(1)          # or scatter_add, index_add, bmm

After::

    rows, perm, inverse, offs = route(ids.reshape(-1), E, k)
    g, u = experts_up(x, rows, inverse, offs, [W13.mT], 2)
    out = experts_down(silu(g) * u, w, rows, perm, inverse, offs, W2.mT, k)

Why it is valid: the order of equal ids is the sort's own choice, and all readers of ``perm`` read
the new one; a product has the rows of its left factor; a weight of a row may be applied before or
after a product, and before or after the rows are put back in order.

Each of the three steps is independent: there may be any ops between them. A product whose rows are
not such a gather (they were weighted before, or came from other ranks), or that is not summed like
this, becomes ``experts_up`` of rows that are already sorted. Leaves alone: products with a bias
argument; tensors that are changed in place between the steps, with a reason.
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.dynamo.packed import column_readers, half_readers
from coda_inductor.dynamo.summed_pairs import Pairs, Sum, by_row
from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import fake, is_cast, is_erased, plain
from coda_inductor.graph.read import Call, called, kind, op_name, read
from coda_inductor.graph.sizes import same, same_layout
from coda_inductor.graph.walk import base, chain, closure, only_reader
from coda_inductor.matching import Hazards, bodies, memory, move, replace
from coda_inductor.matching.guards import mutates, written_nodes
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.semantic.experts import ROUTE, experts_down, experts_up, group_rows

#: Torch's ops, and the ops that transformers uses instead.
_PRODUCTS = ("_grouped_mm", "grouped_mm", "torch._ops.transformers.grouped_mm_fallback")
#: Kinds of ops that may compute a weight from a parameter.
_DERIVED = ("names", "turns", "copies", "casts")


def raise_experts(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its regions, in place; counts each block of experts."""
    for body in bodies(graph):
        products = [node for node in body.graph.nodes if op_name(node) in _PRODUCTS]
        if not products:
            for node in filter(_loops, body.graph.nodes):
                text = "a Python loop over experts breaks the graph: each expert runs alone"
                record.refuse("experts", node, refuse("experts-loop", text))
            continue
        hazards = Hazards(body.graph)
        routes: dict[Node, _Route] = {}  # by the ends of the groups
        for node in products:
            if node.users and (match := _rows_of(node)) is not None:
                pairs = match[-1]
                hazards.writes = [w for w in hazards.writes if not pairs.empties(w)]
                whole = any(Sum(p, pairs).follow() for p in products if _ends(p) is _ends(node))
                _raise_up(node, match, routes, hazards, record, whole=whole)
        for node in products:
            if not is_erased(node):
                _raise_down(node, routes, hazards, record)
        offsets = {ends: route.offsets for ends, route in routes.items()}
        for node in products:
            if not is_erased(node) and node.users:
                _raise_alone(node, offsets, hazards)


def _loops(node: Node) -> bool:
    """Is ``node`` a mask of pairs that a Python loop over experts reads (transformers' ``eager``
    experts)? The graph then ends in the middle of ::

        mask = one_hot(ids, E).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero(): ...
    """
    if op_name(node) != "permute" or op_name(node.all_input_nodes[0]) != "one_hot":
        return False
    sums = [n for n in node.users if op_name(n) == "sum"]
    greater = [n for total in sums for n in total.users if op_name(n) == "greater"]
    return all(any(u.op == "output" for u in n.users) for n in (node, *greater)) and bool(greater)


class _Route:
    """Pairs in the order of their experts: ``pairs`` as read, and the results of ``route``."""

    def __init__(self, pairs: Pairs):
        self.pairs = pairs
        put = Put(pairs.perm)
        route = put(ROUTE, pairs.ids, pairs.experts, pairs.top_k)
        self.rows, self.perm, self.inverse, self.offsets = (
            put(operator.getitem, route, i) for i in range(4)
        )
        pairs.perm.replace_all_uses_with(put.cast(self.perm, fake(pairs.perm).dtype))
        pairs.perm = self.perm


#: Operands of a product whose rows are gathered, the gather, its source, and the pairs.
_Rows = tuple[tuple[Node, Node, Node], Node, Node, Pairs]


def _operands(node: Node) -> tuple[Node, Node, Node] | None:
    """A, B and the group ends of a grouped product without bias; None for other nodes."""
    call = read(node)
    if call is None or any(call.get(name) is not None for name in ("bias", "out_dtype")):
        return None
    a, offs = call["input"], call.get("offs")
    b = call["mat2"] if "mat2" in call.args else call.get("weight")
    tensors = plain(a, b, offs)
    return (a, b, offs) if tensors and [x.dim() for x in tensors] == [2, 3, 1] else None


def _ends(product: Node) -> Node | None:
    """The group ends of a grouped product; None for other nodes."""
    operands = _operands(product)
    return None if operands is None else operands[2]


def _rows_of(product: Node) -> _Rows | None:
    """Operands, gather, its source, and pairs of a product with gathered rows; else None."""
    if (operands := _operands(product)) is None:
        return None
    a, b, offs = operands
    gather = base(a, lambda n: is_cast(n) or op_name(n) in ("masked_fill", "masked_fill_"))
    call = read(gather)
    if call is None or (source := _gather_source(call)) is None:
        return None
    x, index = source
    if fake(x).dim() != 2 or (pairs := Pairs.of(index)) is None:
        return None
    counted = pairs.counted(offs, fake(b).shape[0])
    between = [n for n in chain(a, lambda n: n is not gather) if not is_cast(n)][:-1]
    if not all(map(pairs.empties, between)):
        return None
    m = fake(pairs.ids).shape[0]
    rows = same(fake(x).shape[0] * pairs.top_k, m)
    rows = rows and same(fake(a).shape, (m, fake(x).shape[1]))
    return (operands, gather, x, pairs) if counted and rows else None


def _gather_source(call: Call) -> tuple[Node, Node] | None:
    """(source, index) of gathered rows, x[i], index_select(x, 0, i) or gather(x, 0, i); or None."""
    index = call.get("index")
    if call.op == "getitem" and isinstance(index, Node):
        return call["input"], index
    if call.op in ("index_select", "gather") and call["dim"] in (0, -2):
        return (call["input"], index) if by_row(index, call.node) else None
    return None


def _raise_up(
    product: Node,
    match: _Rows,
    routes: dict[Node, _Route],
    hazards: Hazards,
    record: Record,
    *,
    whole: bool,
) -> None:
    """Replace a product, and the next one of the same rows with a similar weight, by
    ``experts_up``. ``whole``: it is later summed by token, so rows without expert are not read."""
    (a, b, offs), gather, x, pairs = match
    if _changed({pairs.perm, offs}, hazards) or hazards.between((gather, product)):
        why = refuse("mutation", "memory or a mode changes between its sort and its product")
        record.refuse("experts", product, why)
        return
    route = _Route(pairs)
    routes.setdefault(offs, route)
    put = Put(product)
    x = put.cast(x, fake(a).dtype)
    twins = {n: w for n in a.users if (w := _twin_weight(n, product, hazards)) is not None}
    for gemm in (product, *twins):
        _add_bias_by_columns(gemm, route, offs, hazards, whole=whole)
    if whole:
        _unmask(product, pairs, offs)
    halves = half_readers(product)
    gemms = [(product, b), *twins.items()][: 1 if halves else 2]
    for _, weight in gemms:
        _hoist(weight, product)
    weights, rows = [weight for _, weight in gemms], (route.rows, route.inverse, route.offsets)
    call = put(experts_up, x, *rows, weights, pairs.top_k, 2 if halves else 1)
    _take_parts(put, call, halves or {node: i for i, (node, _) in enumerate(gemms)})


def _take_parts(put: Put, call: Node, numbers: dict[Node, int]) -> None:
    parts = [put(operator.getitem, call, i) for i in numbers.values()]
    for node, part in zip(numbers, parts, strict=True):
        move(node, part)


def _unmask(node: Node, pairs: Pairs, ends: Node) -> None:
    """Drop masks that set rows without an expert to zero: these rows are not read."""
    for user in [u for u in node.users if pairs.empties(u) and _hidden(u, ends)]:
        node.meta["example_value"] = fake(user)  # of which what reads it is recorded as a view
        replace(user, node)


def _add_bias_by_columns(
    product: Node, route: _Route, ends: Node, hazards: Hazards, *, whole: bool
) -> None:
    """Add each expert's bias, as rows of its groups, after the columns of ``product`` are selected.
    Then a gate that reads both halves can be in one tile. ``whole`` as in :func:`_raise_up`."""
    call = called(only_reader(product), "add")
    if call is None:
        return
    total, rows = call.node, call["other"] if call["input"] is product else call["input"]
    match = route.pairs.bias(rows)
    if match is None or not route.offsets < rows:
        return
    if whole:
        _unmask(total, route.pairs, ends)
    parts = column_readers(total)
    if _changed({product, total}, hazards) or hazards.between((product, total, *parts)):
        return
    put_rows = Put(rows)
    for node, columns in (parts or {total: slice(None)}).items():
        put, which = Put(node), (slice(None), columns)
        part, bias = product, match[0]
        if parts:
            part, bias = put(operator.getitem, part, which), put_rows(operator.getitem, bias, which)
        new = put(operator.add, part, put_rows(group_rows, bias, match[1], route.offsets))
        move(node, new)


def _hidden(node: Node, ends: Node) -> bool:
    """Do all results of ``node`` end in products that skip rows without an expert?"""

    def readers(reader: Node) -> list[Node]:
        multiplied = op_name(reader) in _PRODUCTS and _ends(reader) is ends
        return [] if multiplied else list(reader.users)

    return not any(n.op == "output" or mutates(n) for n in closure([node], readers))


def _changed(nodes: set[Node], hazards: Hazards) -> bool:
    """Is one of the tensors ``nodes`` changed in place anywhere? Changes of other results of the
    same op (a sort's values) do not matter."""
    storages = {storage for node in nodes for storage in memory(node) or ()}
    changed = {n for w in hazards.writes for n in written_nodes(w) if isinstance(fake(n), Tensor)}
    return any(not storages.isdisjoint(memory(n) or ()) for n in changed - {*hazards.writes})


def _raise_alone(node: Node, offsets: dict[Node, Node], hazards: Hazards) -> None:
    """Replace a product of sorted rows by ``experts_up``. ``offsets`` maps group ends to the same
    tensor with a leading zero."""
    operands = _operands(node)
    if operands is None or fake(operands[2]).dtype != torch.int32:
        return
    a, b, ends = operands
    if not fake(a).is_floating_point() or fake(a).dtype != fake(b).dtype:
        return
    if _changed({ends}, hazards):
        return
    put = Put(node)
    if ends not in offsets:
        offsets[ends] = put(F.pad, ends, (1, 0))
    halves = half_readers(node)
    call = put(experts_up, a, None, None, offsets[ends], [b], 1, 2 if halves else 1)
    _take_parts(put, call, halves or {node: 0})


def _sum_biases(put: Put, bias: Node, w: Node | None, pairs: Pairs) -> Node:
    """The weighted sum of ``bias`` (E, d) over each token's pairs that have an expert: (T, d)."""
    ids = put("view", pairs.ids, -1, pairs.top_k)
    none = put(operator.ge, ids, pairs.experts)
    weights = put.cast(put("logical_not", none), fake(bias).dtype)
    if w is not None:
        weights = put(operator.mul, weights, put.cast(w, fake(bias).dtype))
    rows = put(operator.getitem, bias, put("masked_fill", ids, none, 0))
    return put("squeeze", put(torch.bmm, put("unsqueeze", weights, 1), rows), 1)


def _twin_weight(node: Node, product: Node, hazards: Hazards) -> Node | None:
    """The weight of ``node`` if it is a later product of the same rows as ``product``, and the
    weight can be computed before that; else None."""
    if not product < node or op_name(node) not in _PRODUCTS:
        return None
    operands, target = _operands(node), _operands(product)
    if operands is None or target is None or operands[::2] != target[::2]:
        return None
    fits = same_layout(fake(operands[1]), fake(target[1]))
    source = base(
        operands[1], lambda n: n > product and (kind(n) in _DERIVED or op_name(n) == "getattr")
    )
    before = fits and source < product and not hazards.between((product, node))
    return operands[1] if before else None


def _hoist(node: Node, before: Node) -> None:
    if node < before:
        return
    for n in node.all_input_nodes:
        _hoist(n, before)
    before.prepend(node)


def _raise_down(node: Node, routes: dict[Node, _Route], hazards: Hazards, record: Record) -> None:
    operands = _operands(node)
    route = None if operands is None else routes.get(operands[2])
    if route is None or operands is None:
        return
    a, b, _ = operands
    sum_ = Sum(node, route.pairs).follow()
    if sum_ is None:
        text = "the sum of its rows by token has an unsupported form"
        record.refuse("experts", node, refuse("experts-sum", text))
        return
    inputs = [n for n in (sum_.weights, sum_.onto) if n is not None and n.op != "placeholder"]
    if hazards.between((node, *inputs), sum_.node):
        why = refuse("mutation", "memory or a mode changes between its product and its sum")
        record.refuse("experts", node, why)
        return
    put = Put(sum_.node)
    w = sum_.weights
    if w is not None and fake(w).dim() != 2:
        w = put("view", w, -1, route.pairs.top_k)
    rows = route.rows, route.perm, route.inverse, route.offsets
    dtype = fake(sum_.node).dtype
    out = put(experts_down, a, w, *rows, b, route.pairs.top_k, dtype)
    if sum_.bias is not None:
        out = put(operator.add, out, _sum_biases(put, sum_.bias, w, route.pairs))
    out = put.cast(out, dtype)
    if sum_.onto is not None:
        out = put(operator.add, sum_.onto, out)
    if not same(fake(out).shape, fake(sum_.node).shape):
        out = put("reshape", out, fake(sum_.node).shape)
    replace(sum_.node, out)
    record.fire("experts")
