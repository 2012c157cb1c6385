# SPDX-License-Identifier: Apache-2.0
"""Find a plain PyTorch function inside a Dynamo graph.

The idiom is traced with ``torch.fx`` and both sides are read through :mod:`normalize`, so that the
spelling does not matter; ``add`` and ``mul`` match in either order; literals are captured; float
casts, which change only an intermediate's rounding, are skipped (callers check the result's dtype).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.graph.nodes import fake, is_cast, is_view
from coda_inductor.graph.walk import base, chain, widens
from coda_inductor.matching.normalize import COMMUTATIVE, literal_call, normalize


@dataclass
class Match:
    """One occurrence of an idiom: the value of each parameter, and the nodes that it covers."""

    root: Node
    bound: dict[str, Any] = field(default_factory=dict)
    nodes: dict[Node, None] = field(default_factory=dict)  # ordered set: ops of the idiom
    casts: dict[Node, None] = field(default_factory=dict)  # casts that were skipped
    #: pairs of equal views: the same value if nothing changes between the two
    twins: dict[tuple[Node, Node], None] = field(default_factory=dict)


@dataclass(frozen=True)
class Flat:
    """An argument of an op: ``node``, whose shape is (1, ..., 1, d), as a vector (d,)."""

    node: Node


class Idiom:
    """An idiom that is traced. ``function`` takes tensors and literals and returns one tensor."""

    def __init__(self, function: Callable[..., Any]):
        graph = torch.fx.symbolic_trace(function).graph
        self.root: Node = graph.output_node().args[0]
        self.parameters = {n: n.target for n in graph.nodes if n.op == "placeholder"}
        self.calls = {n: normalize(n) for n in graph.nodes}
        call = self.calls[base(self.root, self._is_cast)]
        self.op = None if call is None else call.op
        self.ops = self._needed()

    def _needed(self) -> frozenset[str | None]:
        """The ops that every occurrence has; None stands for an op that no node can be."""
        ops, todo = set(), [self.root]
        while todo:
            node = base(todo.pop(), self._is_cast)
            if node not in self.parameters and self._negated(node) is None:
                call = self.calls[node]
                ops.add(None if call is None else call.op)
                todo += [n for n in call.args.values() if isinstance(n, Node)] if call else []
        return frozenset(ops)

    def match(self, root: Node) -> Match | None:
        """The occurrence of this idiom whose result is ``root``, or None."""
        if is_cast(root):
            return None  # the idiom ends at the op; a cast after it stays in the graph
        match = Match(root)
        return match if self._all([(self.root, root)], match) else None

    def _is_cast(self, pattern: Any) -> bool:
        call = self.calls[pattern] if isinstance(pattern, Node) else None
        return call is not None and call.op == "cast"

    def _all(self, pairs: list[tuple[Any, Any]], match: Match) -> bool:
        """Do all ``pairs`` (pattern, target) match, in this order? If one argument order of a
        commutative op makes a later pair fail, its bindings are undone and the other is tried."""
        if not pairs:
            return True
        (pattern, target), *rest = pairs
        pattern = base(pattern, self._is_cast)
        if not isinstance(pattern, Node):
            return not isinstance(target, Node) and pattern == target and self._all(rest, match)
        if pattern in self.parameters:
            fits = self._parameter(self.parameters[pattern], target, match)
            return fits and self._all(rest, match)
        if not isinstance(target, Node):
            return self._minus(pattern, target, match) and self._all(rest, match)
        *casts, target = chain(target, is_cast)
        match.casts.update(dict.fromkeys(casts))
        want, have = self.calls[pattern], normalize(target)
        if want is not None and have is not None and want.op != have.op:
            have = literal_call(target, have)
        if want is None or have is None or (want.op, {*want.args}) != (have.op, {*have.args}):
            return False
        match.nodes.update(dict.fromkeys((target, *have.through)))
        orders = [[(want[name], have[name]) for name in want.args]]
        if want.op in COMMUTATIVE:
            orders.append([(want["input"], have["other"]), (want["other"], have["input"])])
        for pairs in orders:
            saved = [dict(d) for d in (match.bound, match.nodes, match.casts, match.twins)]
            if self._all([*pairs, *rest], match):
                return True
            match.bound, match.nodes, match.casts, match.twins = saved
        return False

    def _negated(self, pattern: Node) -> str | None:
        """The parameter that ``pattern`` negates, or None. If the parameter is a number, the graph
        contains the negated number."""
        call = self.calls[pattern]
        return self.parameters.get(call["input"]) if call and call.op == "neg" else None

    def _minus(self, pattern: Node, target: Any, match: Match) -> bool:
        name = self._negated(pattern)
        number = isinstance(target, (int, float)) and not isinstance(target, bool)
        return name is not None and number and self._parameter(name, -target, match)

    def _parameter(self, name: str, target: Any, match: Match) -> bool:
        # A cast to a wider dtype before the idiom belongs to it (x.float()); one to a narrower
        # dtype is the user's rounding of an input and stays.
        *casts, target = chain(target, widens)
        match.casts.update(dict.fromkeys(casts))
        if name in match.bound:
            return _same(match.bound[name], target, match.twins)
        match.bound[name] = target
        return True


def match_ops(node: Node) -> set[str]:
    """The ops that ``node`` may be matched as. Idioms that end with another op cannot end here."""
    call = normalize(node)
    return {form.op for form in (call, literal_call(node, call)) if form is not None}


def first_match(idioms: Iterable[Idiom], root: Node) -> Match | None:
    """The occurrence, with result ``root``, of the first of ``idioms`` that has one; else None."""
    return next((m for i in idioms if (m := i.match(root))), None)


def _same(left: Any, right: Any, twins: dict[tuple[Node, Node], None]) -> bool:
    """Are both the same literal or node, or equal views? Equal views are added to ``twins``."""
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return type(left) is type(right) and left == right
    if left is not right:
        if not is_view(left, fake(right)):
            return False
        twins[left, right] = None
    return True
