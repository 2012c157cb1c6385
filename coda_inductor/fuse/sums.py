# SPDX-License-Identifier: Apache-2.0
"""A sum of GEMMs is one GEMM over concatenated K.

Before::

    dh = dg @ Wg + du @ Wu

After::

    dh = [dg | du] @ [Wg ; Wu]

Valid for every sum of products of one shape; the sum is then rounded once instead of each product.
Two terms of equal K are read in place (``mainloop.readings.join``). Others must be concatenated.
That pays if elementwise kernels write the left operands anyway, so that only the weights are
copied, or if such kernels at least read them, as for the gradients of q, k and v.

Each left operand is written to its columns by its own kernel (``semantic.columns``).
"""

from torch.fx import Node

from coda_inductor.fuse.region import Region, in_place
from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import Legal, addends, gemm_inputs, producer, routes_of, terms
from coda_inductor.graph.layout import relay
from coda_inductor.graph.nodes import aten, elementwise, fake, renames, renames_or_casts
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import back_to, base, readers
from coda_inductor.semantic.columns import COLUMNS, install


def find_sum(anchor: Node, scope: Scope, legal: Legal) -> tuple[tuple[Node, ...], Node] | None:
    """(terms, total) of the largest sum with ``anchor`` that one GEMM can compute; or None."""
    best = None
    node = anchor
    while len(node.users) == 1:
        (node,) = node.users
        if node.op != "call_function":
            break
        if not renames_or_casts(node):
            parts = terms(node) if addends(node) else None
            if parts is None:
                break
            ordered = tuple(sorted(parts))
            if _joinable(ordered, scope) and all(legal(t) is None for t in ordered):
                best = (ordered, node)
            elif len(ordered) > 2:
                break  # what does not hold for these does not for more of them
    return best


def _joinable(parts: tuple[Node, ...], scope: Scope) -> bool:
    shapes = [fake(t).shape for t in parts]
    dtypes = {fake(t).dtype for t in parts}
    sides = {(t in scope.forward, checkpoint(t)) for t in parts}
    routes = {routes_of(t) for t in parts}
    if len(dtypes) != 1 or len(sides) != 1 or not all(same(s, shapes[0]) for s in shapes):
        return False
    if routes != {(None, None)}:  # of one grouping, and without gathers
        offsets, rows = next(iter(routes))
        return len(routes) == 1 and offsets is not None and rows is None and in_place(parts)
    return in_place(parts) or all(_copy_is_free(t, scope) for t in parts)


def _copy_is_free(term: Node, scope: Scope) -> bool:
    """Does one of Inductor's kernels in the same pass write or read the left operand of ``term``,
    so that it can also write a copy?"""
    left, _ = gemm_inputs(term)
    if _is_elementwise(left):
        return True
    _, users = readers(base(left))
    return any(elementwise(u) and scope.same_side(u, term) for u in users)


def _is_elementwise(node: Node) -> bool:
    """Does a kernel of Inductor's, not the epilogue of a GEMM, write ``node``? Heads that it writes
    in the order of rows are permuted views of its result."""
    node = base(node, lambda n: renames(n) or n.target is aten.permute.default)
    return elementwise(node) and producer(node) is None


def factors(region: Region, before: Node) -> tuple[list[Node], list[Node]]:
    """The A and B operands of a region's GEMM, inserted before ``before``. Operands that cannot be
    read in place are concatenated. If an elementwise kernel writes a left operand, its other
    readers then read a slice of the concatenation, to avoid a second copy. Exceptions are operands
    whose strides are seen (outputs), and readers that another left operand depends on."""
    pairs = [gemm_inputs(anchor) for anchor in region.anchors]
    left, right = [a for a, _ in pairs], [b for _, b in pairs]
    if region.total is None:
        return left[:1], right
    if region.in_place:
        return left, right
    put = Put(region.anchors[-1], before)
    install()
    a, b = put(COLUMNS, left), put(aten.cat.default, right, 0)
    between, end = back_to(min(left), left), 0
    for part in left:
        start, end = end, end + fake(part).shape[1]
        if not _is_elementwise(part):
            continue
        piece = Put(part, before)(aten.slice.Tensor, a, 1, start, end)
        others = [u for u in part.users if u not in (a, *region.anchors) and u not in between]
        if relay(part, piece, others) is not None or not others:
            a.graph.erase_node(piece)
    return [a], [b]
