# SPDX-License-Identifier: Apache-2.0
"""Equal quantizations of one tensor become one node.

Before::

    q1, s1 = chain(view(x)); q2, s2 = chain(x.t()) ...        gate and up, dgrad and wgrad

After::

    q, s = quantize(x as it lies, (M, K)); 1 / s; views and transposes of these

Why it is valid: an amax and a cast are of elements, wherever they lie; what differs in the spelling
is which of x's views they are of. Two nodes become one only where the graph would compute them in
the same pass (forward, backward, or recomputed there) and in the same checkpoint.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.nodes import aten, erased, fake, is_cast, is_transpose, renames, row_major
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base
from coda_inductor.rewrite.fp8.chains import Chain
from coda_inductor.semantic.fp8 import quantize


@dataclass(frozen=True)
class Quantized:
    """One tensor's quantization in the graph.

    Attributes:
        node: the ``quantize`` node.
        q: its result in FP8.
        scale: its scale.
        inverse: what undoes the scale: its reciprocal, or itself where it divides.
        divides: whether x is divided by the scale.
    """

    node: Node
    q: Node
    scale: Node
    inverse: Node
    divides: bool


@dataclass(frozen=True)
class Form:
    """How a tensor lies.

    Attributes:
        x: the tensor that the chain reads, or what it is the transpose of.
        turned: whether it is its transpose.
        flat: whether all dimensions but the last count as one.
        dims: what the amax is over, of x (flattened).
    """

    x: Node
    turned: bool
    flat: bool
    dims: tuple[int, ...]


def form_of(chain: Chain) -> Form:
    """How the tensor that ``chain`` quantizes lies in memory."""
    x, dims = chain.x, chain.dims
    tensor = fake(x)
    if tensor.dim() == 2 and is_transpose(x) and row_major(fake(x.args[0])):
        return Form(x.args[0], True, False, tuple(sorted(1 - d for d in dims)))
    last = tensor.dim() - 1
    static = isinstance(tensor.shape[-1], int)
    if tensor.dim() > 2 and static and row_major(tensor) and dims in ((), (last,)):
        return Form(x, False, True, (1,) if dims else ())
    return Form(x, False, False, dims)


def merge(graph: Graph, chains: Iterable[Chain]) -> dict[Node, Quantized]:
    """Replace ``chains`` in place, in graph order; each quantization by its FP8 result."""
    scope = Scope(graph)
    known: dict[tuple, Quantized] = {}
    for chain in sorted(chains, key=lambda c: c.magnitude):
        form = form_of(chain)
        place = (chain.q in scope.forward, chain.q in scope.graded, checkpoint(chain.q))
        kind = chain.dtype, chain.power_of_two, chain.divides
        key = (origin(form.x), _matrix(form), form.dims, kind, place)
        if key not in known:
            known[key] = _put(graph, chain, form)
        made = known[key]
        _replace(graph, chain.q, made.q, form)
        _replace(graph, chain.scale, made.scale, form)
    return {made.q: made for made in known.values()}


def origin(node: Node) -> Any:
    """Equal for nodes that hold the same elements in the same order: the tensor that both are views
    of, and through which dtypes it went."""
    node = base(node)
    if is_cast(node):
        return (origin(node.args[0]), fake(node).dtype)
    return node


def _matrix(form: Form) -> str:
    """The rows' length of a matrix, or the shape of anything else; as text, for symbols."""
    shape = fake(form.x).shape
    return str(shape[-1] if form.flat or len(shape) == 2 else tuple(shape))


def _put(graph: Graph, chain: Chain, form: Form) -> Quantized:
    put = Put(graph, like=chain.magnitude)
    with graph.inserting_before(chain.magnitude):
        x = form.x
        if form.flat:
            source = base(x)
            width = fake(x).shape[-1]
            alike = fake(source).dim() == 2 and same(fake(source).shape[1], width)
            x = source if alike else put(aten.view.default, x, [-1, width])
        kind = [chain.dtype, chain.power_of_two] + [True] * chain.divides
        node = put(quantize, x, list(form.dims), *kind)
        q, scale = (put(operator.getitem, node, i) for i in range(2))
        inverse = scale if chain.divides else put(aten.reciprocal.default, scale)
    return Quantized(node, q, scale, inverse, chain.divides)


def _replace(graph: Graph, old: Node, new: Node, form: Form) -> None:
    """Let all that reads ``old``, an N-D or transposed spelling of ``new``, read ``new``."""
    if erased(old):
        return
    target = fake(new).shape
    for user in list(old.users):
        if not user.users and user.op != "output":
            graph.erase_node(user)
        elif renames(user) and not form.turned and same(fake(user).shape, target):
            user.replace_all_uses_with(new)
            graph.erase_node(user)
    if old.users:
        put = Put(graph, like=old)
        with graph.inserting_before(old):
            if form.turned and len(target) == 2:
                new = put.transpose(new)
            elif form.flat and len(target) == 2:
                width = fake(old).shape[-1]
                new = put(aten.view.default, new, [*put.sizes(form.x)[:-1], width])
            elif not target and fake(old).dim():  # inference keeps all dimensions
                new = put(aten.view.default, new, [1] * fake(old).dim())
        old.replace_all_uses_with(new)
    prune([old])
