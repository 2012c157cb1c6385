# SPDX-License-Identifier: Apache-2.0
"""What a tensor of a Dynamo graph is made of, for every size: a small abstract interpretation.

``constants`` runs the nodes that make a mask, which needs sizes that are numbers. Here each node is
known as an expression in the indices of its elements (``index_values``) instead: ``arange(n)`` is
its index, ``arange(n)[:, None] >= arange(n)`` is "index -2 minus index -1 is at least 0".

Why it is valid: each op of the table maps expressions as torch defines it, for all indices and all
sizes. Elements are matched by broadcasting only where sizes are 1 or provably equal
(``graph.sizes.same``), so that two symbols are never taken for one number. Numbers are
computed by running the op itself on one element of the recorded dtype, and indices are int64.

Refuses, with a reason: everything else. Inputs, parameters, buffers; results of in-place ops; ops
that are not in the table; offsets that are symbolic themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.dynamo.attention.index_calls import (
    FILLED,
    allow,
    arguments,
    converted,
    fill,
    literal,
    not_negative,
    op_name,
    run,
)
from coda_inductor.dynamo.attention.index_values import (
    Affine,
    Choice,
    DataError,
    NotProvenError,
    Value,
    as_affine,
    both,
    choice,
    compare,
    constant,
    index,
    negation,
    substitute,
)
from coda_inductor.graph.sizes import same
from coda_inductor.matching import value
from coda_inductor.refusal import refuse

_POINTWISE = frozenset({"add", "sub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne", "where",
                        "masked_fill"})  # fmt: skip
_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


class IndexProof:
    """The values of one graph's nodes.

    Args:
        graph: a Dynamo graph, or the body of a checkpointed region in one.
        changed: nodes that in-place ops of this graph may change.
        outer: for a body, its placeholders and what the graph around it passes for each.
        around: the proof for the graph around a body.
    """

    def __init__(
        self,
        graph: Graph,
        changed: set[Node],
        outer: Mapping[Node, Node] | None = None,
        around: IndexProof | None = None,
    ):
        self._changed, self._outer, self._around = changed, outer or {}, around
        self._known: dict[Node, Value | NotProvenError] = {}
        for node in graph.nodes:  # in order, so that a long graph needs no deep recursion
            if isinstance(value(node), torch.Tensor):
                try:
                    self._known[node] = self._value(node)
                except NotProvenError as error:
                    self._known[node] = error

    def value(self, node: Node) -> Value:
        """The elements of tensor ``node`` by their indices.

        Raises:
            NotProvenError: with the reason, if they are not known for every size.
        """
        known = self._known.get(node, NotProvenError("it is no tensor"))
        if isinstance(known, NotProvenError):
            raise known
        return known

    def _value(self, node: Node) -> Value:
        if node in self._changed:
            raise DataError(refuse("mask-mutated", "an in-place op changes it"))
        if node in self._outer and self._around is not None:
            return self._around.value(self._outer[node])
        name = op_name(node)
        if node.op not in ("call_function", "call_method"):
            text = f"it depends on {getattr(node.target, '__name__', node.target)}"
            raise DataError(refuse("mask-data", text))
        if name in FILLED:
            result: Value = fill(node, name)
        elif name in _POINTWISE:
            result = self._pointwise(node, name)
        elif name in _OPS:
            if not node.args and name != "arange":  # torch.clone(input=x)
                raise NotProvenError(f"{name} is called in a way that its proof does not know")
            result = _OPS[name](self, node)
        else:
            for source in node.all_input_nodes:  # data at its root says more than the op's name
                if isinstance(self._known.get(source), NotProvenError):
                    self.value(source)
            raise NotProvenError(f"{name} is no op that its proof knows")
        shape, dtype = value(node).shape, value(node).dtype
        if isinstance(result, Affine) and dtype != torch.int64:
            raise NotProvenError(f"its indices are {dtype}, not int64")
        ones = {d - len(shape): Affine(0) for d, size in enumerate(shape) if same(size, 1)}
        result = substitute(result, ones)
        if isinstance(result, Affine) and not result.slopes:
            return constant(result.constant)
        return result

    # What the ops mean.

    def _pointwise(self, node: Node, name: str) -> Value:
        allow(node, {"other", "mask", "value"})
        nodes = [*node.args, *node.kwargs.values()]
        values = [self._operand(arg, node) for arg in nodes]
        if any(isinstance(v, Affine) for v in values):
            if name == "neg":
                return as_affine(values[0]) * -1
            if len(values) != 2 or name in ("where", "masked_fill"):
                raise NotProvenError("it chooses between indices")
            left, right = map(as_affine, values)
            if name in _COMPARISONS:
                return compare(name, left, right)
            if name == "mul":
                if left.slopes and right.slopes:
                    raise NotProvenError("it multiplies indices with each other")
                return left * right.constant if left.slopes else right * left.constant
            return left + right if name == "add" else left - right
        cases = {v.when for v in values if isinstance(v, Choice) and v.when}
        if len(cases) > 1:
            raise NotProvenError("it computes with numbers that depend on the indices in two ways")
        when = next(iter(cases), frozenset())
        yes = run(node, [v.yes for v in values if isinstance(v, Choice)])
        return choice(when, yes, run(node, [v.no for v in values if isinstance(v, Choice)]))

    def _operand(self, arg: Any, result: Node) -> Value:
        """An argument of an elementwise op: a number, or a tensor that is broadcast to ``result``,
        which leaves dimensions, as they are counted here, where they are."""
        known = arg if not isinstance(arg, Node) else value(arg)
        if isinstance(known, (bool, int, float)):
            return constant(known)
        if not isinstance(arg, Node) or not isinstance(known, torch.Tensor):
            raise NotProvenError(f"it computes with {known}, whose value is symbolic")
        inner = self.value(arg)
        for mine, wide in zip(reversed(known.shape), reversed(value(result).shape), strict=False):
            if not same(mine, 1) and not same(mine, wide):
                raise NotProvenError("sizes are not known to be equal")
        return inner

    def _logic(self, node: Node, op: str) -> Value:
        allow(node, {"input", "other"})
        nodes = [*node.args, *node.kwargs.values()]
        values = [self._operand(arg, node) for arg in nodes]
        for arg in nodes:
            if isinstance(arg, Node) and value(arg).dtype != torch.bool:
                raise NotProvenError("it joins bits of numbers")
        if op == "not":
            return negation(values[0])
        if op == "or":
            return negation(both(*map(negation, values)))
        return both(*values)

    def _cast(self, node: Node) -> Value:
        inner = self._operand(node.args[0], node)
        if isinstance(inner, Affine):
            return inner
        source, to = value(node.args[0]).dtype, value(node).dtype
        return choice(inner.when, converted(inner.yes, source, to), converted(inner.no, source, to))

    def _expand(self, node: Node) -> Value:
        return self._operand(node.args[0], node)

    def _reshape(self, node: Node) -> Value:
        """Dimensions of size 1 come and go; the others must stay, in order."""
        inner = self._source(node)
        if value(node).dtype != value(node.args[0]).dtype:
            raise NotProvenError("it reads the bits of numbers as others")
        if isinstance(inner, Choice) and not inner.when:
            return inner
        old, new = (_wide(value(n).shape) for n in (node.args[0], node))
        sizes = zip(old.values(), new.values(), strict=False)
        if len(old) != len(new) or not all(same(*pair) for pair in sizes):
            raise NotProvenError("a reshape moves its elements")
        return substitute(inner, {o: index(n) for o, n in zip(old, new, strict=True)})

    def _transpose(self, node: Node) -> Value:
        _, first, second = arguments(node, "input", "dim0", "dim1")
        rank = max(value(node).dim(), 1)
        dims = [literal(d) % rank - rank for d in (first, second)]
        return substitute(self._source(node), dict(zip(dims, map(index, dims[::-1]), strict=True)))

    def _arange(self, node: Node) -> Value:
        allowed = {
            "dtype",
            "device",
            "layout",
            "pin_memory",
            "requires_grad",
            "start",
            "end",
            "step",
        }
        allow(node, allowed)
        args = list(node.args)
        if len(args) == 1 and "end" in node.kwargs:
            args.append(node.kwargs["end"])  # what stands alone in front is the start
        start = args[0] if len(args) > 1 else node.kwargs.get("start", 0)
        step = args[2] if len(args) > 2 else node.kwargs.get("step", 1)
        return index(-1) * literal(step) + as_affine(constant(literal(start)))

    def _tensor(self, node: Node) -> Value:
        number = node.args[0] if node.args else None
        if not isinstance(number, (bool, int, float)):
            raise NotProvenError("it is made of a list of numbers")
        return constant(converted(number, None, value(node).dtype))

    def _triangle(self, node: Node, upper: bool) -> Value:
        """Keep where column - row is >= diagonal (triu) or <= diagonal (tril); 0 elsewhere."""
        _, diagonal = arguments(node, "input", "diagonal", diagonal=0)
        inner = self._source(node)
        offset = index(-1) - index(-2) - as_affine(constant(literal(diagonal)))
        kept = offset if upper else offset * -1
        zero = converted(0, None, value(node).dtype)
        if isinstance(inner, Choice) and (not inner.when or inner.no == 0):
            return choice({*inner.when, kept}, inner.yes, zero)
        raise NotProvenError("it computes with numbers that depend on the indices in two ways")

    def _cumsum(self, node: Node) -> Value:
        if self._source(node) == constant(0):
            return constant(0)
        raise NotProvenError("it sums numbers that are not all 0")

    def _diff(self, node: Node) -> Value:
        """Differences of neighbours, where they all are one number, the first one included."""
        _, n, dim, before, after = arguments(
            node, "input", "n", "dim", "prepend", "append", n=1, dim=-1, prepend=None, append=None
        )
        shape = value(node.args[0]).shape
        inner, dim = as_affine(self._source(node)), literal(dim)
        dim = dim % len(shape) - len(shape)
        if n != 1 or after is not None or value(node.args[0]).dtype != torch.int64:
            raise NotProvenError("it takes differences of another kind")
        if before is not None:
            if not isinstance(known := value(before), torch.Tensor) or known.dtype != torch.int64:
                raise NotProvenError("it takes differences of numbers that are no integers")
            sizes = [1 if d - len(shape) == dim else size for d, size in enumerate(shape)]
            if known.dim() != len(sizes) or not all(map(same, known.shape, sizes)):
                raise NotProvenError("differences need sizes that match")
            first = substitute(inner, {dim: Affine(0)})
            if as_affine(first) - as_affine(self.value(before)) != Affine(inner.slope(dim)):
                raise NotProvenError("its first difference is not the others'")
        return constant(inner.slope(dim))

    def _getitem(self, node: Node) -> Value:
        inner, source = self._source(node), value(node.args[0])
        items = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if any(isinstance(item, Node) for item in items):
            return self._gather(node, inner, items)
        used = sum(item is not None and item is not Ellipsis for item in items)
        if Ellipsis in items:
            at = items.index(Ellipsis)
            rest = (slice(None),) * (source.dim() - used)
            items = (*items[:at], *rest, *items[at + 1 :])
        else:
            items = (*items, *(slice(None),) * (source.dim() - used))
        by: dict[int, Affine] = {}
        old, new = -source.dim(), -value(node).dim()
        for item in items:
            if isinstance(item, slice):
                if item.step not in (None, 1):
                    raise NotProvenError("it takes every so many elements")
                by[old] = index(new) + Affine(not_negative(item.start or 0))
            elif item is not None:
                by[old] = Affine(not_negative(item))
            old += item is not None
            new += item is None or isinstance(item, slice)
        return substitute(inner, by)

    def _gather(self, node: Node, inner: Value, items: tuple[Any, ...]) -> Value:
        """A tensor indexed by one tensor a dimension, each of them the index along one of the
        result's dimensions: it only moves dimensions."""
        shape = value(node.args[0]).shape
        by: dict[int, Affine] = {}
        if len(items) != len(shape):
            raise NotProvenError("it is indexed by tensors along some dimensions only")
        for dim, (item, size) in enumerate(zip(items, shape, strict=True)):
            at = self._operand(item, node)
            known = value(item)
            if not isinstance(known, torch.Tensor) or known.dtype != torch.int64:
                raise NotProvenError("it is indexed by other things than integer tensors")
            at = as_affine(at)
            whole = [d for d in range(-known.dim(), 0) if at == index(d)]
            if at != Affine(0) and not any(same(known.shape[d], size) for d in whole):
                raise NotProvenError("it is indexed by numbers not known to be in range")
            by[dim - len(shape)] = at
        return substitute(inner, by)

    def _source(self, node: Node) -> Value:
        if not node.args or not isinstance(node.args[0], Node):
            raise NotProvenError(f"{op_name(node)} is called in a way that its proof does not know")
        return self.value(node.args[0])


_OPS: dict[str, Callable[[IndexProof, Node], Value]] = {
    "arange": IndexProof._arange,
    "tensor": IndexProof._tensor,
    "to": IndexProof._cast,
    "expand": IndexProof._expand,
    "reshape": IndexProof._reshape,
    "transpose": IndexProof._transpose,
    "cumsum": IndexProof._cumsum,
    "diff": IndexProof._diff,
    "getitem": IndexProof._getitem,
    "and": lambda proof, node: proof._logic(node, "and"),
    "or": lambda proof, node: proof._logic(node, "or"),
    "not": lambda proof, node: proof._logic(node, "not"),
    "triu": lambda proof, node: proof._triangle(node, True),
    "tril": lambda proof, node: proof._triangle(node, False),
}


def _wide(shape: torch.Size) -> dict[int, Any]:
    """Sizes that are not known to be 1, by dimension."""
    sizes = {d - len(shape): size for d, size in enumerate(shape)}
    return {dim: size for dim, size in sizes.items() if not same(size, 1)}
