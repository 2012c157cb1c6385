# SPDX-License-Identifier: Apache-2.0
"""Gate and up in one tile (rule R6): two GEMMs of one input become one paired program.

Before::

    g = x @ Wg; u = x @ Wu; a = silu(g * r) * (u * r)

After::

    a = gemm_epilogue([x], [Wg, Wu], [r]):  v0 = acc0 * r; v1 = acc1 * r; store silu(v0) * v1

Valid because elementwise work on two products of one shape needs only their tiles at the same
position. Refuses when something else in the forward pass reads one of the two products: that
product would have to be stored, and then loading it in the second GEMM's epilogue costs no more.
Products that only the backward pass reads are stored beside the result.
"""

import contextlib
from collections.abc import Iterator

from torch.fx import Node

from coda_inductor.fuse.grow import Bans, grow
from coda_inductor.fuse.region import Region
from coda_inductor.graph.gemms import GEMMS, fast_accumulation, gemm_inputs, routes_of
from coda_inductor.graph.nodes import arguments, aten, fake, renames_or_casts
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same, same_layout
from coda_inductor.graph.vocabulary import LOWERINGS
from coda_inductor.graph.walk import back_to, base, closure, readers
from coda_inductor.refusal import Refused


def find_pair(anchor: Node, scope: Scope, bans: Bans) -> Region | None:
    """The region of ``anchor`` and a later GEMM of the same A that combines both, or None."""
    return next((r for r in _regions(anchor, scope, bans) if _meet(r, scope)), None)


def alternating(anchor: Node, scope: Scope, bans: Bans) -> Region | None:
    """The region of a grouped GEMM whose even and odd columns are read separately and then combined
    (gate and up of gpt-oss), or None."""
    lanes = {user: _lane(user, anchor) for user in anchor.users}
    if routes_of(anchor)[0] is None or {*lanes.values()} != {0, 1}:
        return None
    columns = {node: lane for node, lane in lanes.items() if lane is not None}
    region = grow((anchor,), scope, bans, lanes=columns)
    return region if _meet(region, scope) else None


def _lane(node: Node, product: Node) -> int | None:
    """0 if ``node`` takes the even columns of ``product``, 1 for the odd ones, None for others."""
    if node.target is not aten.slice.Tensor or arguments(node)["step"] != 2:
        return None
    m, n = fake(product).shape
    half = n % 2 == 0 and same(fake(node).shape, (m, n // 2))
    return arguments(node)["start"] or 0 if half else None


def _regions(anchor: Node, scope: Scope, bans: Bans) -> Iterator[Region]:
    a, b = gemm_inputs(anchor)
    if not _meets(anchor, scope):
        return
    for other in sorted(n for n in _readers(a) if anchor < n):
        match = fast_accumulation(other) == fast_accumulation(anchor)
        match = match and routes_of(other) == routes_of(anchor) and scope.same_side(anchor, other)
        match = match and same_layout(fake(b), fake(gemm_inputs(other)[1]))
        if not match or anchor in back_to(anchor, [other]):  # by its weight: A is the same
            continue
        with contextlib.suppress(Refused):
            yield grow((anchor, other), scope, bans)


def _meets(anchor: Node, scope: Scope) -> bool:

    def meets(node: Node) -> bool:
        return bool(scope.products(node) & ~scope.products(anchor))

    def absorbed(node: Node) -> bool:
        fits = node.target in LOWERINGS or renames_or_casts(node)
        return fits and scope.same_side(node, anchor)

    step = closure([anchor], lambda n: () if meets(n) else filter(absorbed, n.users))
    return any(map(meets, step))


def _readers(a: Node) -> set[Node]:
    """The GEMMs that read ``a``, also through views of it (each linear layer has its own view)."""
    names, users = readers(base(a, _views), _views)
    inputs = [name for name in names if same(fake(name).shape, fake(a).shape)]
    return {user for user in users if user.target in GEMMS and gemm_inputs(user)[0] in inputs}


def _views(node: Node) -> bool:
    return node.target is aten.view.default


def _meet(region: Region, scope: Scope) -> bool:
    """Does a stored value depend on both products, and do only backward nodes read all others?"""
    #: Each value -> the products that it depends on.
    reach: dict[object, frozenset[str]] = {acc: frozenset({acc}) for acc in region.accs}
    for step in region.steps:
        reach[step.name] = frozenset().union(*(reach.get(a, frozenset()) for a in step.args))
    results = dict(region.stored())
    results |= {r.value: [] for r in region.reduces.values() if r.value not in results}
    single = [nodes for value, nodes in results.items() if len(reach.get(value, ())) < 2]
    inside = {*region.values, *region.reduces}
    readers = [u for nodes in single for n in nodes for u in n.users if u not in inside]
    forward = any(u.op == "output" or u in scope.forward for u in readers)
    return len(single) < len(results) and all(single) and not forward
