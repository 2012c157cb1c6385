# SPDX-License-Identifier: Apache-2.0
"""What one region absorbs, node by node, in the order of the graph: see ``grow``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import unset_fake_temporarily
from coda_inductor.fuse import heads, operands
from coda_inductor.fuse.region import Region
from coda_inductor.fuse.stores import MAX_STORES
from coda_inductor.graph.gemms import (
    GEMMS,
    bias_of,
    bias_of_groups,
    producer,
    routes_of,
    scales_of,
)
from coda_inductor.graph.nodes import (
    arguments,
    aten,
    constant,
    fake,
    is_transpose,
    renames,
    renames_or_casts,
)
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.sizes import same
from coda_inductor.graph.vocabulary import LOGICAL, LOWERINGS, REDUCTIONS, Value
from coda_inductor.graph.walk import base, closure, readers, source
from coda_inductor.program import OPS, Reduce, Step
from coda_inductor.program.dtypes import FLOATS
from coda_inductor.program.ir import ROUTES
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.experts import WGRAD
from coda_inductor.semantic.fp8_casts import CAST
from coda_inductor.semantic.rotary import rotate_heads

#: Nodes that must stay outside, and why.
Banned = Mapping[Node, Refusal]


class Grower:
    """Grows ``region``. ``loaded``: tiles that it loads in any case."""

    def __init__(
        self, region: Region, scope: Scope, banned: Banned, loaded: AbstractSet[Node] = frozenset()
    ):
        self.region, self.scope, self.banned, self.loaded = region, scope, banned, loaded
        self.anchor = region.anchors[0]
        self.start = min(region.anchors)
        self.m, self.n, _ = region.shape
        self.depends: dict[Node, bool] = {}
        self.origin = ""

    def run(self) -> Region:
        region = self.region
        if region.total is not None:
            self._sum(region.total)
        self._routes()
        if region.lanes:
            region.values[self.anchor] = f"{self.anchor.name} (read by columns)"
            region.values |= {node: region.accs[lane] for node, lane in region.lanes.items()}
        elif region.total is None:
            for anchor, acc in zip(region.anchors, region.accs, strict=True):
                region.values[anchor] = acc
                if (why := self._begin(anchor, acc)) is not None:
                    region.refusals[anchor] = why
                    return region
        seen: set[Node] = {region.total} if region.total is not None else set(region.anchors)
        seen |= {*region.lanes}
        frontier = {user for root in seen for user in root.users} - seen
        while frontier:
            node = min(frontier)
            frontier.discard(node)
            seen.add(node)
            reason = self.banned.get(node) or self._absorb(node)
            if reason is None:
                frontier |= {user for user in node.users if user not in seen}
            else:
                region.refusals[node] = reason
        if self.anchor not in self.scope.forward:
            self._recomputed_operands()
        return region

    def _routes(self) -> None:
        """The operands that tell which rows use which weights."""
        for node, kind in zip(routes_of(self.anchor), ROUTES, strict=True):
            if node is not None:
                self.region.operand(node, kind)

    def _sum(self, total: Node) -> None:
        """The terms, and the nodes between them and their sum, are inside and have no value of
        their own: only the sum is read."""
        todo = [total]
        while todo:
            node = todo.pop()
            self.region.values[node] = f"{node.name} (part of a sum)"
            if node not in self.region.anchors:  # views also have sizes among their inputs
                todo += [n for n in node.all_input_nodes if isinstance(fake(n), torch.Tensor)]
        self.region.values[total] = "acc"

    def _begin(self, node: Node, acc: Value) -> Refusal | None:
        """What the GEMM op itself does to its product: scales (FP8), a bias."""
        shape, bias, scales = fake(node).shape, bias_of(node), scales_of(node)
        for op, operand in [("mul", scale) for scale in scales] + [("add", bias)]:
            if operand is None:
                continue
            plain = all(value == 1 for value in node.kwargs.values())
            if not plain or self._check(operand, shape) is not None:
                return refuse("bias-form", "its bias, scales or alpha/beta are not supported")
            self.origin = "aten.addmm (bias)" if operand is bias else str(node.target)
            through = base if operand in scales else source  # unfused, it takes float32
            acc = self._emit(op, acc, self._operand(operand, shape, through))
        self.region.values[node] = acc
        return None

    def _absorb(self, node: Node) -> Refusal | None:
        """Absorb ``node`` into the region; None, or why it must stay outside."""
        if node.op == "output":
            return refuse("graph-output", "it is an output of the graph")
        if not self.scope.same_side(node, self.anchor):
            return refuse("other-side", "it belongs to the other pass (forward or backward)")
        if checkpoint(node) != checkpoint(self.anchor):
            text = "the border of an activation checkpoint is between it and the GEMM"
            return refuse("checkpoint-border", text)
        if node.target in REDUCTIONS:
            return self._reduction(node)
        return self._lower(node)

    def _lower(self, node: Node, pull: bool = False) -> Refusal | None:
        """Compute ``node`` on the tile, absorbed or as a copy (``pull``). Returns None, or why that
        is impossible (then nothing has changed)."""
        self.origin = str(node.target)
        tensor = fake(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1:
            text = f"{node.target} is not elementwise"
            if self.origin.startswith("coda_inductor.gemm_epilogue"):
                text = "the epilogue of the next fused GEMM reads it"
            return refuse("not-elementwise", text)
        if node.target is aten.permute.default:
            return refuse("transposed", f"{node.target} transposes the tile")
        if operands.wider(node, self.anchor):
            text = f"{node.target} is computed in float64, its GEMM is not"
            return refuse("float64-mixed", text)
        if not same(tensor.shape[-1], self.n) or not same(tensor.numel(), self.m * self.n):
            return refuse("reshaped", f"{node.target} changes the tile's shape")
        lowering = LOWERINGS.get(node.target)
        known = lowering is not None or node.target is rotate_heads
        if not known and not renames_or_casts(node):
            text = f"{node.target} is not in the epilogue vocabulary"
            return refuse("not-in-vocabulary", text)
        saved = self._state()
        reason = self._lower_args(node, lowering, tensor.shape, pull) or operands.too_many(
            [kind for _, kind in self.region.operands], paired=len(self.region.accs) == 2
        )
        if reason is not None:
            self._restore(saved)
        return reason

    def _state(self) -> tuple:
        region = self.region
        parts = region.values, region.pulled, region.operands, region.steps, region.heads
        return tuple(map(copy.copy, parts))

    def _restore(self, state: tuple) -> None:
        region = self.region
        region.values, region.pulled, region.operands, region.steps, region.heads = state

    def _lower_args(self, node: Node, lowering: Any, full: tuple, pull: bool) -> Refusal | None:
        if node.target is rotate_heads:
            return self._of_heads(node, pull)
        inputs = [*node.args, *node.kwargs.values()]
        for arg in inputs:
            if isinstance(arg, Node) and self._value(arg) is None:
                self._pull(arg, node)
        self.origin = str(node.target)
        if lowering is None:
            value = self._value(inputs[0])
            if value is None:
                return refuse("not-elementwise", f"{node.target} is not elementwise")
            self._note(node, value, pull)
            return None
        reason = next((why for a in inputs if (why := self._check(a, full))), None)
        if reason is not None:
            return reason
        args = [self._argument(node, i, a, full) for i, a in enumerate(node.args)]
        kwargs = {k: self._operand(a, full) for k, a in node.kwargs.items()}
        result = lowering(self._emit, *args, **kwargs)
        if result is None:
            text = f"{node.target} with {node.args[1:]} is not in the epilogue vocabulary"
            return refuse("not-in-vocabulary", text)
        if fake(node).dtype == torch.bool and not self.region.is_truth(result):
            result = self._emit("ne", result, 0.0)  # torch's sum of two bools is one
        self._note(node, result, pull)
        return None

    def _of_heads(self, node: Node, pull: bool) -> Refusal | None:
        given = arguments(node)
        tables = given["even"], given["odd"]
        why = next((w for t in tables if (w := self._check(t, fake(t).shape))), None)
        x = self._value(given["x"])
        made = why or heads.lowered(node, x, self.region, self._emit)
        if isinstance(made, Refusal):
            return made
        self._note(node, made, pull)
        return None

    def _pull(self, arg: Node, reader: Node) -> None:
        """Compute the operand ``arg`` of ``reader`` on the tile if that loads no more tiles than
        loading ``arg`` itself; else ``arg`` stays an operand."""
        if arg in self.banned:
            return
        bias = bias_of_groups(arg, self.anchor, self.n)
        if bias is not None and not self._depends(bias) and not operands.wider(bias, self.anchor):
            self._note(arg, self.region.operand(bias, "row"), pull=True)
            return
        own = all(u is reader or self._value(u) is not None for u in arg.users)
        elsewhere = not self.scope.same_side(arg, self.anchor) or producer(arg) is not None
        if not self.scope.recomputed(arg) and (not own or elsewhere or self._depends(arg)):
            return
        saved, before = self._state(), self.tiles() | self.loaded
        if self._lower(arg, pull=True) is None and len(self.tiles() - before) > 1:
            self._restore(saved)

    def tiles(self) -> set[Node]:
        return {node for node, kind in self.region.operands if kind == "tile"}

    def _note(self, node: Node, value: Value, pull: bool) -> None:
        (self.region.pulled if pull else self.region.values)[node] = value

    def _recomputed_operands(self) -> None:
        """Absorb GEMM operands that the backward pass recomputes from tiles of this region, like
        the activation that the weight gradient reads. They cost one store each."""
        tiles = self.tiles()
        known = {*self.region.values, *self.banned}

        def made(node: Node) -> list[Node]:
            again = [u for u in node.users if self.scope.recomputed(u) or renames(u)]
            return [u for u in again if u not in known]

        for node in sorted(closure([user for tile in tiles for user in made(tile)], made)):
            if not renames_or_casts(node):
                self._recomputed_operand(node, tiles)

    def _recomputed_operand(self, node: Node, tiles: set[Node]) -> None:
        names, users = readers(node, renames_or_casts)
        transposed = [u for reader in users if is_transpose(reader) for u in reader.users]
        reads = any(u.target in (*GEMMS, CAST, WGRAD) for u in (*users, *transposed))
        if not reads or self._is_needed_by(node):
            return
        saved = self._state()
        lowered = all(self._lower(name) is None for name in names)
        if not lowered or self.tiles() != tiles or len(self.region.stored()) > MAX_STORES:
            self._restore(saved)

    def _is_needed_by(self, node: Node) -> bool:
        """Does the region depend on ``node``, through nodes outside of it?"""
        needed = {n for n, _ in self.region.operands}
        needed |= {n for a in self.region.anchors for n in a.all_input_nodes}
        last = max(needed)
        outside = closure(
            [node], lambda n: [u for u in n.users if not last < u and u not in self.region.values]
        )
        return not needed.isdisjoint(outside)

    def _reduction(self, node: Node) -> Refusal | None:
        axis_text = f"{node.target} does not reduce one row or column of the tile"
        (source,) = node.all_input_nodes
        dims = arguments(node).get("dim", [-1])
        value = self.region.values.get(source)
        if value is None or not isinstance(dims, (list, tuple)) or node.kwargs:
            return refuse("reduction-axis", axis_text)
        rank = fake(source).dim()
        reduced = sorted(d % rank for d in dims) or [*range(rank)]  # no dims: all of them
        axis = "row" if reduced == [rank - 1] else "col" if reduced == [*range(rank - 1)] else None
        if axis is None or (axis == "col" and node.target is aten.mean.dim):
            return refuse("reduction-axis", axis_text)
        if not isinstance(value, str) or fake(node).dtype not in FLOATS:
            text = f"{node.target} is not a reduction of floating values"
            return refuse("reduction-dtype", text)
        if self.region.heads is not None:
            return heads.UNREDUCED
        if axis == "col" and self.region.grouped:
            text = "each expert has its own rows: no kernel sums over all of them"
            return refuse("reduction-axis", text)
        what = (value, axis, REDUCTIONS[node.target])
        known = {(r.value, r.axis, r.combine): r for r in self.region.reduces.values()}
        self.region.reduces[node] = known.get(what) or Reduce(f"part{len(known)}", *what)
        return None

    def _value(self, node: Node) -> Value | None:
        value = self.region.values.get(node)
        return self.region.pulled.get(node) if value is None else value

    def _check(self, arg: Any, full: tuple) -> Refusal | None:
        """Why ``arg`` cannot be read on the tile, or None."""
        if not isinstance(arg, Node):
            number = isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == arg
            if arg is None or number or isinstance(arg, str):
                return None
            return refuse("operand-kind", f"the scalar {arg!r} is not a plain number")
        if self._value(arg) is not None:
            return None
        if (literal := constant(arg)) is not None:
            return self._check(literal, full)
        if arg in self.region.reduces or self._depends(arg):
            return refuse("operand-depends", f"{arg.name} depends on this GEMM")
        return operands.refusal(arg, full, self.anchor)

    def _depends(self, node: Node) -> bool:
        """Does an outside node depend on the region? (Absorbing its user would make a cycle.)"""
        stack = [node]
        while stack:
            top = stack[-1]
            if self.depends.get(top) is not None:
                stack.pop()
            elif top in self.region.values or top in self.region.reduces:
                self.depends[stack.pop()] = True
            elif top < self.start:
                self.depends[stack.pop()] = False
            elif todo := [n for n in top.all_input_nodes if n not in self.depends]:
                stack += todo
            else:
                self.depends[stack.pop()] = any(self.depends[n] for n in top.all_input_nodes)
        return self.depends[node]

    def _argument(self, node: Node, position: int, arg: Any, full: tuple) -> Any:
        """``arg`` as the op needs it: aten converts between bools and numbers, programs do not."""
        value = self._operand(arg, full)
        if not isinstance(arg, Node) or not isinstance(value, str):
            return value
        logical = node.target in LOGICAL
        wants_bool = logical or (node.target is aten.where.self and position == 0)
        is_bool = fake(arg).dtype == torch.bool
        if is_bool and not wants_bool:
            return self._emit("where", value, 1.0, 0.0)
        return self._emit("ne", value, 0.0) if wants_bool and not is_bool else value

    def _operand(self, arg: Any, full: tuple, through: Any = source) -> Any:
        if not isinstance(arg, Node):
            return float(arg) if isinstance(arg, (int, float)) else arg
        if (value := self._value(arg)) is not None:
            return value
        if (literal := constant(arg)) is not None:
            return literal
        kind = operands.classify(fake(arg).shape, full)
        assert kind is not None, "checked by operands.refusal"
        return self.region.operand(through(arg), kind)

    def _emit(self, op: str, *args: Value) -> Value:
        if not any(isinstance(a, str) for a in args):
            with unset_fake_temporarily():
                wide = [torch.tensor(a, dtype=torch.float64) for a in args]
                return float(OPS[op].torch(*wide))
        name = f"v{len(self.region.steps)}"
        self.region.steps.append(Step(name, op, tuple(args), self.origin))
        return name
