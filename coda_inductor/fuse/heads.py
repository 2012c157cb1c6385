# SPDX-License-Identifier: Apache-2.0
"""Rotations of attention heads on the tile (``program.reference.swap``).

Before::

    z = rotate_heads(f(acc, row, col), ..., even, odd, distance)

After::

    z = f(acc, row, col) * even + f(swap(acc), swapped row, col) * odd

Why it is valid: a swap permutes columns, so it commutes with every elementwise step down to the
accumulator; a vector of rows stays, and one of columns is permuted once, outside the kernel.

Refuses: operands with one value per element of the tile, as the tables of another rotation;
reductions in the same kernel; two accumulators, and FP8 products, whose kernels have no heads.
"""

from torch.fx import Node

from coda_inductor.fuse.region import SWAPPED, Region
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import arguments, fake, label
from coda_inductor.graph.vocabulary import Emit, Value
from coda_inductor.program.dtypes import FP8, dtype_name
from coda_inductor.refusal import Refusal, refuse

UNREDUCED = refuse("kernel-form", "kernels that rotate heads cannot reduce")


def lower(node: Node, x: Value | None, region: Region, emit: Emit) -> Value | Refusal:
    """The value of ``node``, a rotation of ``x``, or the reason why the tile of ``region`` cannot
    compute it. If it cannot, the region's operands and steps may have grown."""
    if not isinstance(x, str):
        return refuse("not-on-tile", "it does not rotate a value of the tile")
    if len(region.accs) > 1 or dtype_name(fake(gemm_inputs(region.anchors[0])[0]).dtype) in FP8:
        return refuse("kernel-form", "kernels of two products, or of FP8, cannot rotate heads")
    if region.reduces:
        return UNREDUCED
    args = arguments(node)
    even, odd, width = args["even"], args["odd"], fake(args["cos"]).shape[-1]
    heads = fake(even).shape[-1], width * (2 if args["paired"] else 1), args["distance"]
    if region.heads not in (None, heads):
        return refuse("kernel-form", "its GEMM already rotates heads of another form")
    region.heads = heads
    other = _swap(x, region, emit)
    if isinstance(other, Refusal):
        return other
    even, odd = (region.operand(table, "table") for table in (even, odd))
    return emit("add", emit("mul", x, even), emit("mul", other, odd))


def _swap(x: str, region: Region, emit: Emit) -> Value | Refusal:
    """The value in the other column of each pair of ``x``, or why it cannot be computed."""
    assert region.heads is not None
    steps = {step.name: step for step in region.steps}
    loaded = {o.name: key for key, o in region.operands.items()}
    other: dict[Value, Value] = {}
    todo = [x]
    while todo:  # not recursive: a chain of steps may be longer than Python's stack
        top = todo[-1]
        args = steps[top].args if top in steps else ()
        if missing := [a for a in args if isinstance(a, str) and a not in other]:
            todo += missing
            continue
        todo.pop()
        if top in other:
            continue
        if top in steps:
            new = tuple(other[a] if isinstance(a, str) else a for a in args)
            other[top] = top if new == args else emit(steps[top].op, *new)
        elif top in region.accs:
            other[top] = emit("swap", top, *map(float, region.heads[1:]))
        else:
            node, kind = loaded[top]
            if kind not in ("row", "col", "scalar"):
                return refuse("heads-tile", f"{label(node)} has one value per element of the tile")
            other[top] = region.operand(node, SWAPPED) if kind == "row" else top
    return other[x]
