# SPDX-License-Identifier: Apache-2.0
"""Decide which values of a region leave the tile, whether they can and should be stored, and what a
region gives up if it needs more shared memory than any kernel has."""

from collections.abc import Callable

from torch.fx import Node

from coda_inductor.fuse.region import Region
from coda_inductor.graph.nodes import elementwise, fake, renames, row_major
from coda_inductor.graph.vocabulary import Value
from coda_inductor.graph.walk import base
from coda_inductor.program.dtypes import WIDTHS, dtype_name
from coda_inductor.program.ops import OPERAND_DTYPES
from coda_inductor.refusal import Refusal, refuse

MAX_STORES = 3
TOO_HEAVY = refuse("shared-memory", "with it, the epilogue needs more shared memory than there is")


def unstorable(
    region: Region, is_final: Callable[[Node], bool] | None = None
) -> dict[Node, Refusal]:
    """Nodes that must leave the region, each with a reason: they cannot be stored, or storing them
    saves nothing. One node at a time, because others may then stay; but half of the nodes if there
    are too many. ``is_final``: while the region grows, which outside nodes stay there."""
    sure = is_final or (lambda _: True)
    stored = region.stored(sure)
    nodes_by_value: dict[Value, list[Node]] = {}
    for node, value in region.values.items():
        nodes_by_value.setdefault(value, []).append(node)
    inside = {*region.values, *region.reduces}
    names = {operand.name for operand in region.operands.values()} | set(stored)

    def only_adds_a_store(value: Value) -> bool:
        """Would Inductor compute ``value`` for free in the kernels that read it? It does so if they
        are elementwise and the inputs of ``value`` are in memory anyway."""
        step = region.unrounded(value)
        if step is None or not names.issuperset(step.names):
            return False
        users = (u for n in nodes_by_value[value] for u in n.users if u not in inside)
        return all(elementwise(u) and not renames(u) and sure(u) for u in users)

    for value, node in ((value, node) for value, nodes in stored.items() for node in nodes):
        if not isinstance(value, str) or dtype_name(fake(node).dtype) not in OPERAND_DTYPES:
            text = "its result is read outside and is not a floating tile"
            return {_owner(node, region): refuse("kernel-form", text)}
        if not row_major(fake(node)):
            text = "its result is not laid out row by row"
            return {_owner(node, region): refuse("store-layout", text)}
        if only_adds_a_store(value):
            text = "fusing it only adds a store: its readers are elementwise too"
            return {_owner(node, region): refuse("no-gain", text)}
    excess = len(stored) - MAX_STORES
    if excess <= 0 or is_final is not None:
        return {}
    order = {node: i for i, node in enumerate(region.values)}
    last = sorted((nodes[0] for nodes in stored.values()), key=order.__getitem__, reverse=True)
    why = refuse("kernel-form", f"more than {MAX_STORES} tiles would be stored")
    return {_owner(node, region): why for node in last[: (excess + 1) // 2]}


def _owner(node: Node, region: Region) -> Node:
    """The op that ``node`` is an alias of: a ban of only the view would not help."""
    return base(node, lambda n: renames(n) and n.all_input_nodes[0] in region.values)


def heaviest(region: Region) -> list[Node]:
    """The absorbed nodes to remove from a ``region`` that does not fit: what is computed from the
    heaviest loaded tile (a norm's gradient on a float32 stream, say), or, if it loads none, from
    the last stored one. A residual's sum before them stays. Empty if none can be removed."""
    tiles = [operand for operand in region.operands.values() if operand.kind == "tile"]
    tiles.reverse()  # of equal ones, take the one that was read last
    loaded = [t.name for t in sorted(tiles, key=lambda t: -WIDTHS[t.dtype])]
    stored = [str(value) for value in reversed(region.stored())]
    return next((nodes for v in (*loaded, *stored) if (nodes := _dependents(v, region))), [])


def _dependents(value: str, region: Region) -> list[Node]:
    reached = {value}
    for step in region.steps:
        if reached.intersection(step.args):
            reached.add(step.name)
    return [n for n in region.work if n not in region.reduces and region.values[n] in reached]
