# SPDX-License-Identifier: Apache-2.0
"""Rotations of attention heads on the tile (``program.heads``).

Before::

    z = rotate_heads(f(acc, row, col), ..., even, odd, distance)

After::

    z = f(acc, row, col) * even + f(swap(acc), swapped row, col) * odd

Why it is valid: a swap permutes columns, so that it goes through every elementwise step down to the
accumulator; one value a row is its own, and one a column is permuted once, outside the kernel.

Refuses: tiles, which would have to be read at another column; a second rotation of what is rotated;
two accumulators, and products of FP8, whose kernels know no heads.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from coda_inductor.fuse.elementwise import Emit, Value
from coda_inductor.fuse.region import SWAPPED, Heads, Region
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import fake
from coda_inductor.program.dtypes import FP8, dtype_name
from coda_inductor.refusal import Refusal, refuse

UNREDUCED = refuse("heads-reduce", "kernels reduce no value behind a rotation or a tile of heads")

_TWICE = refuse("heads-kernel", "what is rotated is rotated already")


def lowered(node: Node, x: Value | None, region: Region, emit: Emit) -> Value | Refusal:
    """The value of ``node``, a rotation of ``x``, or why it cannot be made on the tile of
    ``region``, whose operands and steps may have grown then."""
    if not isinstance(x, str):
        return refuse("not-elementwise", "no value of the tile is rotated")
    if len(region.accs) > 1:
        return refuse("heads-kernel", "kernels of two products know no heads")
    if dtype_name(fake(gemm_inputs(region.anchors[0])[0]).dtype) in FP8:
        return refuse("heads-kernel", "kernels of FP8 know no heads")
    _, cos, _, even, odd, distance = node.args[:6]
    heads = Heads(fake(even).shape[-1], fake(cos).shape[-1], distance)
    if region.heads not in (None, heads):
        return refuse("heads-kernel", "its GEMM has heads of another form already")
    region.heads = heads
    if any(late(reduce.value, region) for reduce in region.reduces.values()):
        return UNREDUCED
    other = _Swapped(region, emit)(x)
    if isinstance(other, Refusal):
        return other
    even, odd = (region.operand(table, "table") for table in (even, odd))
    return emit("add", emit("mul", x, even), emit("mul", other, odd))


def late(value: Value, region: Region) -> bool:
    """Does ``value`` depend on a tile, a table, or another column of the tile?"""
    found = {o.name for o in region.operands.values() if o.kind in ("tile", "table")}
    for step in region.steps:
        if step.op == "swap" or found.intersection(step.args):
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
            args: tuple[Any, ...] = () if step is None or step.op == "swap" else step.args
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
        if step.op == "swap":
            return _TWICE
        args = tuple(self.known[a] for a in step.args)
        return value if args == step.args else self.emit(step.op, *args)
