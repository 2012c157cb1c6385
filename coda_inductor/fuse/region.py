"""Grow a GEMM's epilogue: which neighbours run on its accumulator tile, as which program.

Before::

    mm = aten.mm(y, Wt); v = view(mm, [B, T, d]); x = x0 + v; h = x * gamma; s = (x * x).sum(-1)

After (a :class:`Region`; nothing is changed in the graph)::

    absorbed = {v, x, h, x * x, s}; program: c0 tile, w0 row; store x, h; reduce x * x over N

Why it is valid: a region is convex (no path leaves it and comes back), every absorbed op is
elementwise on the tile or reduces along N, and every value that others read is stored.

Bails out of a node (which then stays outside, with a reason) when the op is not in the vocabulary,
an operand broadcasts over part of M, or the limits on tile operands and stores are reached.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.errors import ProgramError
from coda_inductor.fuse import operands
from coda_inductor.fuse.elementwise import LOGICAL, LOWERINGS, REDUCTIONS, Value
from coda_inductor.graph import ALIASES, FLOATS, aten, fake, is_cast, same
from coda_inductor.program import (
    OPS,
    EpilogueProgram,
    Operand,
    Reduce,
    Step,
    Store,
    simplify,
    verify,
)

GEMMS = (aten.mm.default, aten.addmm.default)
MAX_TILE_OPERANDS = 2  # each costs a staged M x N tile of shared memory
MAX_STORES = 3
MAX_VECTORS = 6


@dataclass
class Region:
    """A GEMM (or a pair of GEMMs) and what its epilogue absorbs, in graph order."""

    anchors: tuple[Node, ...]
    values: dict[Node, Value] = field(default_factory=dict)
    operands: dict[tuple[Node, str], Operand] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    reduces: dict[Node, Reduce] = field(default_factory=dict)
    refusals: dict[Node, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[Any, int, int]:
        a, b = gemm_inputs(self.anchors[0])
        return fake(a).shape[0], fake(b).shape[1], fake(a).shape[1]

    @property
    def absorbed(self) -> list[Node]:
        return [n for n in (*self.values, *self.reduces) if n not in self.anchors]

    @property
    def work(self) -> list[Node]:
        """Absorbed nodes that compute something (views do not)."""
        return [n for n in self.absorbed if n.target not in ALIASES]

    def stored(self) -> dict[Value, list[Node]]:
        """Values that something outside reads, each with the nodes that are read."""
        inside = {*self.values, *self.reduces}
        result: dict[Value, list[Node]] = {}
        for node, value in self.values.items():
            if any(user not in inside for user in node.users):
                result.setdefault(value, []).append(node)
        return result

    def program(self) -> EpilogueProgram:
        """The frozen program, simplified and verified."""
        accs = ("acc",) if len(self.anchors) == 1 else ("acc0", "acc1")
        stores = tuple(
            Store(f"out{i}", str(value), dtype_name(_common_dtype(nodes)))
            for i, (value, nodes) in enumerate(self.stored().items())
        )
        program = EpilogueProgram(
            accs,
            dtype_name(fake(gemm_inputs(self.anchors[0])[0]).dtype),
            tuple(self.operands.values()),
            tuple(self.steps),
            stores,
            tuple(self.reduces.values()),
        )
        return verify(simplify(program))


def gemm_inputs(node: Node) -> tuple[Node, Node]:
    """(A, B) of an ``mm`` or ``addmm`` node."""
    return (node.args[0], node.args[1]) if node.target is aten.mm.default else node.args[1:3]


def constant(node: Node) -> float | None:
    """The number that a 0-dim constant tensor holds (``torch.where(c, x, 0.0)`` makes them)."""
    if node.target is aten.full.default and not node.args[0]:
        number = node.args[1]
    elif node.target is aten.scalar_tensor.default:
        number = node.args[0]
    else:
        return None
    return float(number) if isinstance(number, (int, float)) else None


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``, as programs spell it."""
    return str(dtype).removeprefix("torch.")


def _common_dtype(nodes: list[Node]) -> torch.dtype:
    """The dtype from which every one of ``nodes`` can be made without loss."""
    return functools.reduce(torch.promote_types, (fake(node).dtype for node in nodes))


def grow(anchors: tuple[Node, ...], order: dict[Node, int]) -> Region:
    """The largest legal region around ``anchors``; ``order`` holds every node's position."""
    banned: dict[Node, str] = {}
    while True:
        region = _Grower(anchors, order, banned).run()
        trouble = _violation(region)
        if trouble is None:
            region.refusals.update(banned)
            return region
        node, reason = trouble
        if node in banned or node in anchors:
            raise ProgramError(f"{node.name}: {reason}")
        banned[node] = reason


def _violation(region: Region) -> tuple[Node, str] | None:
    """A node that must leave the region: it would have to be stored, and cannot or need not be."""
    stored = region.stored()
    order = list(region.values)
    for value, node in ((value, node) for value, nodes in stored.items() for node in nodes):
        if not isinstance(value, str) or fake(node).dtype not in FLOATS:
            return _owner(node, region), "its result is read outside and is not a floating tile"
        if not _row_major(fake(node)):
            return _owner(node, region), "its result is not laid out row by row"
        if _only_adds_a_store(value, region, stored):
            return _owner(
                node, region
            ), "it would only add a store: its readers are elementwise too"
    if len(stored) > MAX_STORES:
        last = max((nodes[0] for nodes in stored.values()), key=order.index)
        return _owner(last, region), f"more than {MAX_STORES} tiles would be stored"
    return None


def _row_major(tensor: torch.Tensor) -> bool:
    """Is ``tensor`` contiguous for certain? A kernel stores rows; users keep their strides."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1) and not same(stride, expected):
            return False
        expected = expected * (1 if same(size, 0) else size)
    return True


def _only_adds_a_store(value: Value, region: Region, stored: dict[Value, list[Node]]) -> bool:
    """Would Inductor compute ``value`` for free in the kernels that read it? It would, if they are
    elementwise and all that it is computed from is in memory anyway."""
    step = next((s for s in region.steps if s.name == value), None)
    names = {o.name for o in region.operands.values()} | set(stored)
    if step is None or any(isinstance(a, str) and a not in names for a in step.args):
        return False
    inside = {*region.values, *region.reduces}
    readers = [u for n, v in region.values.items() if v == value for u in n.users]
    return all(
        user in inside or (torch.Tag.pointwise in getattr(user.target, "tags", ()) or is_cast(user))
        for user in readers
    )


def _owner(node: Node, region: Region) -> Node:
    """The op behind an alias: banning a view alone would not help."""
    while node.target in ALIASES and node.args[0] in region.values:
        node = node.args[0]
    return node


class _Grower:
    def __init__(self, anchors: tuple[Node, ...], order: dict[Node, int], banned: dict[Node, str]):
        self.region = Region(anchors)
        self.order, self.banned = order, banned
        self.start = min(order[a] for a in anchors)
        self.m, self.n, _ = self.region.shape
        self.device = fake(anchors[0]).device
        self.depends: dict[Node, bool] = {}
        self.origin = ""

    def run(self) -> Region:
        accs = ("acc",) if len(self.region.anchors) == 1 else ("acc0", "acc1")
        for anchor, acc in zip(self.region.anchors, accs, strict=True):
            self.region.values[anchor] = acc
            if anchor.target is aten.addmm.default and not self._bias(anchor, acc):
                self.region.refusals[anchor] = "its bias or alpha/beta is not supported"
                return self.region
        frontier = {user for anchor in self.region.anchors for user in anchor.users}
        seen: set[Node] = set(self.region.anchors)
        while frontier:
            node = min(frontier, key=self.order.__getitem__)
            frontier.discard(node)
            seen.add(node)
            reason = self.banned.get(node) or self._absorb(node)
            if reason is None:
                frontier |= {user for user in node.users if user not in seen}
            else:
                self.region.refusals[node] = reason
        return self.region

    def _bias(self, node: Node, acc: str) -> bool:
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
            return False
        shape = fake(node).shape
        if self._check(node.args[0], shape) is not None:
            return False
        self.origin = "aten.addmm (bias)"
        self.region.values[node] = self._emit("add", acc, self._operand(node.args[0], shape))
        return True

    def _absorb(self, node: Node) -> str | None:
        """Take ``node`` into the region; None, or why it must stay outside."""
        if node.op != "call_function":
            return "it is an output of the graph" if node.op == "output" else f"it is a {node.op}"
        self.origin = str(node.target)
        if node.target in REDUCTIONS:
            return self._reduction(node)
        tensor = fake(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1:
            return f"{node.target} is not elementwise"
        if not same(tensor.shape[-1], self.n) or not same(tensor.numel(), self.m * self.n):
            return f"{node.target} changes the tile's shape"
        if node.target in ALIASES or is_cast(node):
            source = node.args[0]
            if source not in self.region.values:
                return f"{node.target} is not elementwise"
            self.region.values[node] = self.region.values[source]
            return None
        lowering = LOWERINGS.get(node.target)
        if lowering is None:
            return f"{node.target} is not in the epilogue vocabulary"
        inputs = [*node.args, *node.kwargs.values()]
        reason = next((why for a in inputs if (why := self._check(a, tensor.shape))), None)
        if reason is not None:
            return reason
        if (reason := self._too_many(inputs, tensor.shape)) is not None:
            return reason
        saved = (list(self.region.steps), dict(self.region.operands))
        args = [self._argument(node, i, a, tensor.shape) for i, a in enumerate(node.args)]
        kwargs = {k: self._operand(a, tensor.shape) for k, a in node.kwargs.items()}
        result = lowering(self._emit, *args, **kwargs)
        if result is None:
            self.region.steps, self.region.operands = saved
            return f"{node.target} with {node.args[1:]} is not in the epilogue vocabulary"
        if result in self.region.values.values():
            return f"{node.target} with {node.args[1:]} is a copy"  # outputs must not share memory
        self.region.values[node] = result
        return None

    def _reduction(self, node: Node) -> str | None:
        source = node.args[0]
        dims = node.args[1] if len(node.args) > 1 else None
        if source not in self.region.values or not isinstance(dims, (list, tuple)):
            return f"{node.target} does not reduce one row of the tile"
        rank = fake(source).dim()
        if [d % rank for d in dims] != [rank - 1]:
            return f"{node.target} does not reduce one row of the tile"
        value = self.region.values[source]
        if not isinstance(value, str) or fake(node).dtype not in FLOATS:
            return f"{node.target} is not a reduction of floating values"
        name = f"part{len(self.region.reduces)}"
        self.region.reduces[node] = Reduce(name, value, "row", REDUCTIONS[node.target])
        return None

    def _check(self, arg: Any, full: tuple) -> str | None:
        """Can ``arg`` be read on the tile? None, or why not."""
        if not isinstance(arg, Node):
            number = isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == arg
            if arg is None or number or isinstance(arg, str):
                return None
            return f"the scalar {arg!r} is not a plain number"
        if arg in self.region.values:
            return None
        if (literal := constant(arg)) is not None:
            return self._check(literal, full)
        if arg in self.region.reduces or self._depends(arg):
            return f"{arg.name} depends on this GEMM"
        return operands.refusal(operands.source(arg), full, self.device)

    def _depends(self, node: Node) -> bool:
        """Does an outside node depend on the region? (Absorbing its user would make a cycle.)"""
        stack = [node]
        while stack:
            top = stack[-1]
            if self.depends.get(top) is not None:
                stack.pop()
            elif top in self.region.values or top in self.region.reduces:
                self.depends[stack.pop()] = True
            elif self.order[top] < self.start:
                self.depends[stack.pop()] = False
            elif todo := [n for n in top.all_input_nodes if n not in self.depends]:
                stack += todo
            else:
                self.depends[stack.pop()] = any(self.depends[n] for n in top.all_input_nodes)
        return self.depends[node]

    def _too_many(self, inputs: list[Any], full: tuple) -> str | None:
        """Would the operands exceed what a kernel can stage? None, or the limit."""
        new = {
            (n := operands.source(a), operands.classify(fake(n).shape, full))
            for a in inputs
            if isinstance(a, Node) and a not in self.region.values and constant(a) is None
        }
        if len(self.region.anchors) == 2 and any(kind in ("tile", "row") for _, kind in new):
            return "a paired tile reads only one value a row, or scalars"
        every = set(self.region.operands) | new
        if sum(kind == "tile" for _, kind in every) > MAX_TILE_OPERANDS:
            return f"more than {MAX_TILE_OPERANDS} tile operands"
        if len(every) > MAX_TILE_OPERANDS + MAX_VECTORS:
            return f"more than {MAX_VECTORS} vector operands"
        return None

    def _argument(self, node: Node, position: int, arg: Any, full: tuple) -> Any:
        """``arg`` as the op wants it: aten converts between bools and numbers, programs do not."""
        value = self._operand(arg, full)
        if not isinstance(arg, Node) or not isinstance(value, str):
            return value
        logical = node.target in LOGICAL
        wants_bool = logical or (node.target is aten.where.self and position == 0)
        is_bool = fake(arg).dtype == torch.bool
        if is_bool and not wants_bool:
            return self._emit("where", value, 1.0, 0.0)
        return self._emit("ne", value, 0.0) if wants_bool and not is_bool else value

    def _operand(self, arg: Any, full: tuple) -> Any:
        if not isinstance(arg, Node):
            return float(arg) if isinstance(arg, (int, float)) else arg
        if arg in self.region.values:
            return self.region.values[arg]
        if (literal := constant(arg)) is not None:
            return literal
        node = operands.source(arg)
        kind = operands.classify(fake(node).shape, full)
        assert kind is not None, "checked by operands.refusal"
        known = self.region.operands.get((node, kind))
        if known is None:
            letter = {"tile": "t", "row": "w", "col": "r", "scalar": "s"}[kind]
            name = f"{letter}{len(self.region.operands)}"
            known = Operand(name, kind, dtype_name(fake(node).dtype))
            self.region.operands[node, kind] = known
        return known.name

    def _emit(self, op: str, *args: Value) -> Value:
        if not any(isinstance(a, str) for a in args):
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                wide = [torch.tensor(a, dtype=torch.float64) for a in args]
                return float(OPS[op].torch(*wide))
        name = f"v{len(self.region.steps)}"
        self.region.steps.append(Step(name, op, tuple(args), self.origin))
        return name
