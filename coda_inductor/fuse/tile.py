# SPDX-License-Identifier: Apache-2.0
"""Translate graph ops to steps on the tile of one region, or take them back (see ``grow``), and
decide which tensors from outside an epilogue can read, and how many."""

from collections.abc import Generator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import unset_fake_temporarily
from coda_inductor.fuse import heads
from coda_inductor.fuse.region import Region
from coda_inductor.graph.gemms import bias_of, group_bias, producer, routes_of, scales_of, unscaled
from coda_inductor.graph.nodes import (
    arguments,
    aten,
    axis_of,
    constant,
    fake,
    label,
    renames_or_casts,
    words_for,
)
from coda_inductor.graph.read import op_name
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import classify, same
from coda_inductor.graph.vocabulary import LOGICAL, LOWERINGS, REDUCTIONS, Emit, Value
from coda_inductor.graph.walk import back_to, base, source
from coda_inductor.program import OPS, Reduce, Step
from coda_inductor.program.dtypes import FLOATS, dtype_name
from coda_inductor.program.operands import KINDS
from coda_inductor.program.statistics import ROUNDING
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.define import CROSSING
from coda_inductor.semantic.loss import row_entropy

MAX_TILE_OPERANDS = 3  # each costs a staged M x N tile of shared memory
MAX_VECTORS = 6
#: Nodes that must stay outside, and why.
Bans = dict[Node, Refusal]
#: A call of a recursion that ``unroll`` runs.
_Lowering = Generator[Any, Any, Refusal | None]


class Tile:
    """Computes nodes on the tile of ``region``. ``loaded``: tiles that are loaded in any case."""

    def __init__(
        self, region: Region, scope: Scope, bans: Bans, loaded: AbstractSet[Node] = frozenset()
    ):
        self.region, self.scope, self.bans, self.loaded = region, scope, bans, loaded
        self.anchor = region.anchors[0]
        self.m, self.n, _ = region.shape
        self.origin = ""
        #: Absorbed nodes that do not depend on the products.
        self.extras: list[Node] = []
        #: Each node that was considered, with the state before; for a node, its first place there.
        self.history: list[tuple[Node, Any]] = []
        self.starts: dict[Node, int] = {}

    def _begin(self, node: Node, acc: Value) -> Refusal | None:
        """Apply the scales (FP8) and the bias that the GEMM op itself applies to its product.
        Returns the reason if that is impossible, else None."""
        shape, bias, scales = fake(node).shape, bias_of(node), scales_of(node)
        for op, operand in [("mul", scale) for scale in scales] + [("add", bias)]:
            if operand is None:
                continue
            if not unscaled(node) or self._check(operand, shape) is not None:
                return refuse("bias-form", "its bias, scales or alpha/beta are not supported")
            self.origin = "aten.addmm (bias)" if operand is bias else str(node.target)
            through = base if operand in scales else source  # unfused, it takes float32
            acc = self._emit(op, acc, self._operand(operand, shape, through))
        self._assign(node, acc, pull=False)
        return None

    def _misfit(self, node: Node) -> Refusal | None:
        tensor = fake(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1:
            text = f"{words_for(node)} is not elementwise"
            if str(node.target).startswith("coda_inductor.gemm_epilogue"):
                text = "it is an operand of that epilogue"
            return refuse("not-on-tile", text)
        if node.target is aten.permute.default:
            return refuse("no-neighbours", "it transposes the tile")
        if _wider(node, self.anchor):
            text = f"{words_for(node)} is computed in float64, its GEMM is not"
            return refuse("float64-mixed", text)
        if not same(tensor.shape[-1], self.n) or not same(tensor.numel(), self.m * self.n):
            return refuse("not-on-tile", f"{words_for(node)} changes the tile's shape")
        supported = node.target in LOWERINGS or node.target in CROSSING
        if not supported and not renames_or_casts(node):
            text = f"{words_for(node)} is not in the epilogue vocabulary"
            return refuse("not-in-vocabulary", text)
        return None

    def _lower(self, node: Node, pull: bool = False) -> _Lowering:
        """Compute ``node`` on the tile, absorbed or as a copy (``pull``). Returns None, or the
        reason if it cannot; then nothing has changed."""
        state = self._state()
        reason = (yield self._lower_args(node, pull)) or _too_many(
            [kind for _, kind in self.region.operands], paired=len(self.region.accs) == 2
        )
        if reason is not None:
            self._restore(state)
        return reason

    def _parts(self) -> Iterable[Any]:
        """The lists and dictionaries of the region's state. They grow only at their ends."""
        region = self.region
        lists = region.values, region.copies, region.operands, region.steps
        return *lists, region.reduces, region.refusals, self.extras

    def _state(self) -> Any:
        return [len(part) for part in self._parts()], self.region.heads

    def _restore(self, state: Any) -> None:
        lengths, self.region.heads = state
        for part, length in zip(self._parts(), lengths, strict=True):
            while len(part) > length:
                part.popitem() if isinstance(part, dict) else part.pop()

    def _lower_args(self, node: Node, pull: bool) -> _Lowering:
        if node.target in CROSSING:
            return self._cross(node, pull)
        lowering, full = LOWERINGS.get(node.target), fake(node).shape
        for arg in node.all_input_nodes:
            if self._value(arg) is None:
                yield self._pull(arg, node)
        self.origin = str(node.target)
        if lowering is None:
            value = self._value(node.all_input_nodes[0])
            if value is None:
                return refuse("not-on-tile", f"{words_for(node)} is not elementwise")
            self._assign(node, value, pull)
            return None
        kwargs = arguments(node)
        reason = next((why for a in kwargs.values() if (why := self._check(a, full))), None)
        if reason is not None:
            return reason
        args = [self._argument(node, name, a, full) for name, a in kwargs.items()]
        if self.region.eager and fake(node).dtype == torch.bool:  # numbers are converted first
            dtype = fake(node.all_input_nodes[0]).dtype
            args = [self._round(a, dtype) if isinstance(a, float) else a for a in args]
        result = lowering(self._emitter(node), *args)
        if result is None:
            others = tuple(item for name, item in kwargs.items() if name != "input")
            text = f"{words_for(node)} with {others} is not in the epilogue vocabulary"
            return refuse("not-in-vocabulary", text)
        if fake(node).dtype == torch.bool and not self.region.is_bool(result):
            result = self._emit("ne", result, 0.0)  # torch's sum of two bools is one
        self._assign(node, result, pull)
        return None

    def _cross(self, node: Node, pull: bool) -> Refusal | None:
        args = arguments(node)
        tables = args["even"], args["odd"]
        why = next((w for t in tables if (w := self._check(t, fake(t).shape))), None)
        x = self._value(args["x"])
        result = why or heads.lower(node, x, self.region, self._emit)
        if isinstance(result, Refusal):
            return result
        self._assign(node, result, pull)
        return None

    def _pull(self, arg: Node, reader: Node) -> Generator[Any, Any, None]:
        """Compute the operand ``arg`` of ``reader`` on the tile if that loads no more tiles than
        loading ``arg`` itself; else ``arg`` stays an operand."""
        self._mark(arg, len(self.history) - 1)
        if arg in self.bans:
            return
        bias = group_bias(arg, self.anchor, self.n)
        if bias is not None and not self._depends(bias) and not _wider(bias, self.anchor):
            self._assign(arg, self.region.operand(bias, "row"), pull=True)
            return
        if not self.scope.recomputed(arg) and (
            not self.scope.same_side(arg, self.anchor)
            or any(u is not reader and self._value(u) is None for u in arg.users)
            or self._depends(arg)
        ):
            return
        before = self.tiles() | self.loaded
        if self._misfit(arg) is not None or self._reads_more(arg, before):
            return
        if not self.scope.recomputed(arg) and producer(arg) is not None:
            return
        state = self._state()
        why = yield self._lower(arg, pull=True)
        if why is None and len(self.tiles() - before) > 1:
            self._restore(state)

    def _reads_more(self, node: Node, tiles: set[Node]) -> bool:
        """Is it certain that ``node`` needs two or more tiles besides ``tiles``? Without this check
        a long sum would be tried term by term, for each of its readers."""
        new = self._loads(node, tiles)
        parts = (n for n in node.all_input_nodes if self._value(n) is None)
        loads = tiles | new
        return len(new) + any(source(n) not in loads and self._loads(n, loads) for n in parts) > 1

    def _loads(self, node: Node, tiles: set[Node]) -> set[Node]:
        new: set[Node] = set()
        if not isinstance(fake(node), torch.Tensor):
            return new
        full = fake(node).shape
        for n in node.all_input_nodes:
            if self._value(n) is None and constant(n) is None and isinstance(fake(n), torch.Tensor):
                tile = source(n)
                lone = tile not in tiles and group_bias(n, self.anchor, self.n) is None
                if lone and self._misfit(tile) and classify(fake(n).shape, full) == "tile":
                    new.add(tile)
        return new

    def tiles(self) -> set[Node]:
        return {node for node, kind in self.region.operands if kind == "tile"}

    def _assign(self, node: Node, value: Value, pull: bool) -> None:
        if self.region.eager:
            value = self._round(value, fake(node).dtype)
        (self.region.copies if pull else self.region.values)[node] = value

    def _round(self, value: Value, dtype: torch.dtype) -> Value:
        op, step = ROUNDING.get(dtype_name(dtype)), self.region.step(value)
        if op is None or (step is not None and step.op == op):
            return value
        return self._emit(op, value)

    def _reduction(self, node: Node) -> Refusal | None:
        axis_text = f"{words_for(node)} does not reduce one row or column of the tile"
        axis, value = axis_of(node), self.region.values.get(node.all_input_nodes[0])
        if value is None or axis is None or (axis == "col" and node.target is aten.mean.dim):
            return refuse("not-on-tile", axis_text)
        if not isinstance(value, str) or fake(node).dtype not in FLOATS:
            text = f"{words_for(node)} is not a reduction of floating values"
            return refuse("not-on-tile", text)
        if self.region.heads is not None:
            return heads.UNREDUCED
        if self.region.eager and REDUCTIONS[node.target] != "max":
            return refuse("eager-numerics", "a kernel sums in another order than eager")
        if axis == "col" and self.region.grouped:
            text = "each expert has its own rows: no kernel sums over all of them"
            return refuse("not-on-tile", text)
        if node.target is row_entropy:
            lse = self.region.reduces.get(arguments(node)["lse"])
            if lse is None or (lse.value, lse.combine) != (value, "logsumexp"):
                return refuse("not-on-tile", "the log-sum-exp that it takes is not on the tile")
        key = (value, axis, REDUCTIONS[node.target])
        known = {(r.value, r.axis, r.combine): r for r in self.region.reduces.values()}
        self.region.reduces[node] = known.get(key) or Reduce(f"part{len(known)}", *key)
        return None

    def _value(self, node: Node) -> Value | None:
        value = self.region.values.get(node)
        return self.region.copies.get(node) if value is None else value

    def _mark(self, node: Node, index: int) -> None:
        self.starts[node] = min(index, self.starts.get(node, index))

    def _check(self, arg: Any, full: tuple) -> Refusal | None:
        """The reason why ``arg`` cannot be read on the tile, or None."""
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
            return refuse("operand-depends", f"{label(arg)} depends on this GEMM")
        return _refusal(arg, full, self.anchor)

    def _depends(self, node: Node) -> bool:
        """Does the outside ``node`` depend on the region? Then absorbing its user makes a cycle."""
        if self.scope.depends(node, self.region.anchors):
            return True
        extras = self.extras
        return bool(extras) and not back_to(min(extras), [node]).keys().isdisjoint(extras)

    def _argument(self, node: Node, name: str, arg: Any, full: tuple) -> Any:
        """``arg`` as the op needs it: aten converts between bools and numbers, programs do not."""
        value = self._operand(arg, full)
        if not isinstance(arg, Node) or not isinstance(value, str):
            return value
        wants_bool = node.target in LOGICAL or name == "condition"
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
        kind = classify(fake(arg).shape, full)
        assert kind is not None, "checked by _refusal"
        return self.region.operand(through(arg), kind)

    def _emitter(self, node: Node) -> Emit:
        if not self.region.eager or op_name(node) != "pow":
            return self._emit
        # Of a power, torch rounds each product.
        return lambda op, *args: self._round(self._emit(op, *args), fake(node).dtype)

    def _emit(self, op: str, *args: Value) -> Value:
        if not any(isinstance(a, str) for a in args):
            with unset_fake_temporarily():
                wide = [torch.tensor(a, dtype=torch.float64) for a in args]
                return float(OPS[op].torch(*wide))
        name = f"v{len(self.region.steps)}"
        self.region.steps.append(Step(name, op, tuple(args), self.origin))
        return name


def _too_many(kinds: Sequence[str], *, paired: bool) -> Refusal | None:
    if paired and "tile" in kinds:
        text = "a paired tile reads only one value per row, one per column, or scalars"
        return refuse("kernel-form", text)
    if kinds.count("tile") > MAX_TILE_OPERANDS:
        return refuse("kernel-form", f"more than {MAX_TILE_OPERANDS} tile operands")
    if len(kinds) > MAX_TILE_OPERANDS + MAX_VECTORS:
        return refuse("kernel-form", f"more than {MAX_VECTORS} vector operands")
    return None


def _wider(node: Node, anchor: Node) -> bool:
    """Is ``node`` float64 although the tile of the GEMM ``anchor`` is computed in float32?"""
    return fake(node).dtype == torch.float64 != fake(anchor).dtype


def _refusal(node: Node, full: tuple, anchor: Node) -> Refusal | None:
    tensor = fake(node)
    if not isinstance(tensor, torch.Tensor):
        return refuse("operand-kind", f"{label(node)} is not a tensor")
    if tensor.dtype not in FLOATS:
        return refuse("operand-dtype", f"{label(node)} is {tensor.dtype}, not a floating type")
    if _wider(node, anchor):
        return refuse("float64-mixed", f"{label(node)} is float64, the GEMM is not")
    if tensor.device != fake(anchor).device:
        text = f"{label(node)} is on {tensor.device}, the GEMM on {fake(anchor).device}"
        return refuse("operand-device", text)
    if (kind := classify(tensor.shape, full)) is None:
        text = f"{label(node)} broadcasts over part of the leading dimensions"
        return refuse("operand-broadcast", text)
    if KINDS[kind].columns and routes_of(anchor)[0] is not None:
        return refuse("kernel-form", "rows of several experts cannot share a vector of columns")
    return None
