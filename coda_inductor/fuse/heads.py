# SPDX-License-Identifier: Apache-2.0
"""Norms and rotations of attention heads on the tile (``program.heads``).

Before::

    y = rms_norm_heads(f(acc, row, col), ..., gain, eps, head)
    z = rotate_heads(y, ..., even, odd, distance)

After::

    x = f(acc, row, col);  r = rsqrt(head_sum(x * x) / head + eps);  y = x * r * gain
    z = y * even + (f(swap(acc), swapped row, col) * r * swapped gain) * odd

Why it is valid: a swap permutes columns, so that it goes through every elementwise step down to the
accumulator; one value a row or a head is its own, and one a column is permuted once, outside the
kernel. Where x is stored too, the sum is of what is stored (``program.statistics``).

Refuses: tiles, which would have to be read at another column; a second rotation of what is rotated;
norms of what depends on a tile, on a rotation or on another norm of heads, for kernels sum before
they load; two accumulators, and products of FP8, whose kernels know no heads.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from coda_inductor.fuse.elementwise import Emit, Value
from coda_inductor.fuse.region import SWAPPED, Heads, Region
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import fake
from coda_inductor.program.dtypes import FP8, dtype_name
from coda_inductor.program.heads import HEAD_OPS
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.norms import rms_norm_heads
from coda_inductor.semantic.rotary import rotate_heads

#: What is lowered here.
LOWERED = (rms_norm_heads, rotate_heads)

UNREDUCED = refuse(
    "heads-reduce", "kernels reduce no value behind a rotation, a norm or a tile of heads"
)

_TWICE = refuse("heads-kernel", "what is rotated is rotated already")


def loads(node: Node) -> tuple[Node, ...]:
    """What kernels load for ``node``, one of ``LOWERED``."""
    if node.target is rotate_heads:
        return node.args[3:5]
    return () if node.args[2] is None else (node.args[2],)


def lowered(node: Node, x: Value | None, region: Region, emit: Emit) -> Value | Refusal:
    """The value of ``node``, one of ``LOWERED`` of ``x``, or why it cannot be made on the tile of
    ``region``, whose operands and steps may have grown then."""
    if not isinstance(x, str):
        return refuse("not-elementwise", "no value of the tile is normalized or rotated")
    if len(region.accs) > 1:
        return refuse("heads-kernel", "kernels of two products know no heads")
    if dtype_name(fake(gemm_inputs(region.anchors[0])[0]).dtype) in FP8:
        return refuse("heads-kernel", "kernels of FP8 know no heads")
    heads = _joined(_form(node), region.heads)
    if heads is None:
        return refuse("heads-kernel", "its GEMM has heads of another form already")
    region.heads = heads
    if any(late(reduce.value, region) for reduce in region.reduces.values()):
        return UNREDUCED
    return (_rotated if node.target is rotate_heads else _normalized)(node, x, region, emit)


def _form(node: Node) -> Heads:
    if node.target is rms_norm_heads:
        return Heads(node.args[4], 0, 0)
    _, cos, _, even, _, distance = node.args[:6]
    return Heads(fake(even).shape[-1], fake(cos).shape[-1], distance)


def _joined(form: Heads, known: Heads | None) -> Heads | None:
    """What is both, or None where a program cannot be: one may have no rotation, or the same."""
    if known is None or known == form:
        return form
    if known.size != form.size or (known.width and form.width):
        return None
    return form if form.width else known


def _normalized(node: Node, x: str, region: Region, emit: Emit) -> Value | Refusal:
    _, _, gain, eps, head = node.args[:5]
    if late(x, region):
        text = "what it normalizes depends on a tile, on a rotation or on another norm of heads"
        return refuse("heads-late", text)
    mean = emit("mul", emit("head_sum", emit("mul", x, x)), 1 / head)
    y = emit("mul", x, emit("rsqrt", emit("add", mean, eps)))
    return y if gain is None else emit("mul", y, region.operand(gain, "row"))


def _rotated(node: Node, x: str, region: Region, emit: Emit) -> Value | Refusal:
    other = _Swapped(region, emit)(x)
    if isinstance(other, Refusal):
        return other
    even, odd = (region.operand(table, "table") for table in node.args[3:5])
    return emit("add", emit("mul", x, even), emit("mul", other, odd))


def late(value: Value, region: Region) -> bool:
    """Does ``value`` depend on a tile, a table, or another column of the tile?"""
    found = {o.name for o in region.operands.values() if o.kind in ("tile", "table")}
    for step in region.steps:
        if step.op in HEAD_OPS or found.intersection(step.args):
            found.add(step.name)
    return value in found


class _Swapped:
    """From a value to what stands at the other column of its pair."""

    def __init__(self, region: Region, emit: Emit):
        assert region.heads is not None
        self.region, self.emit, self.heads = region, emit, region.heads
        self.made = {step.name: step for step in region.steps}
        self.loaded = {o.name: key for key, o in region.operands.items()}
        self.known: dict[Value, Value] = {}

    def __call__(self, value: Value) -> Value | Refusal:
        # Not recursive: a chain of elementwise steps may be longer than Python's stack.
        todo = [value]
        while todo:
            top = todo[-1]
            step = self.made.get(str(top))
            args: tuple[Any, ...] = () if step is None or step.op in HEAD_OPS else step.args
            if more := [a for a in args if a not in self.known]:
                todo += more
                continue
            todo.pop()
            if top not in self.known:
                found = self._swapped(top)
                if isinstance(found, Refusal):
                    return found
                self.known[top] = found
        return self.known[value]

    def _swapped(self, value: Value) -> Value | Refusal:
        """``value`` at the other column, its arguments being known there."""
        if not isinstance(value, str):
            return value
        if value in self.region.accs:
            return self.emit("swap", value, float(self.heads.width), float(self.heads.distance))
        if value in self.loaded:
            node, kind = self.loaded[value]
            if kind == "row":
                return self.region.operand(node, SWAPPED)
            if kind in ("col", "scalar"):
                return value
            if kind == "tile":
                return refuse("heads-tile", f"{node.name} is read at every place of the tile")
            return _TWICE
        step = self.made[value]
        if step.op == "head_sum":
            return value
        if step.op in HEAD_OPS:
            return _TWICE
        args = tuple(self.known[a] for a in step.args)
        return value if args == step.args else self.emit(step.op, *args)
