# SPDX-License-Identifier: Apache-2.0
"""Which values of a region leave the tile, and whether they can and should."""

from __future__ import annotations

from torch.fx import Node

from coda_inductor.fuse.region import Region
from coda_inductor.graph.nodes import elementwise, fake, renames, row_major
from coda_inductor.graph.vocabulary import Value
from coda_inductor.graph.walk import base
from coda_inductor.program.dtypes import dtype_name
from coda_inductor.program.ops import STORE_DTYPES
from coda_inductor.refusal import Refusal, refuse

MAX_STORES = 3


def unstorable(region: Region) -> tuple[Node, Refusal] | None:
    """A node that must leave the region, because it cannot be stored or because storing it gains
    nothing; and why."""
    stored = region.stored()
    order = list(region.values)
    for value, node in ((value, node) for value, nodes in stored.items() for node in nodes):
        if not isinstance(value, str) or dtype_name(fake(node).dtype) not in STORE_DTYPES:
            text = "its result is read outside and is not a floating tile"
            return _owner(node, region), refuse("store-dtype", text)
        if not row_major(fake(node)):
            text = "its result is not laid out row by row"
            return _owner(node, region), refuse("store-layout", text)
        if _only_adds_a_store(value, region, stored):
            text = "fusing it only adds a store: its readers are elementwise too"
            return _owner(node, region), refuse("store-needless", text)
    if len(stored) > MAX_STORES:
        last = max((nodes[0] for nodes in stored.values()), key=order.index)
        text = f"more than {MAX_STORES} tiles would be stored"
        return _owner(last, region), refuse("epilogue-full", text)
    return None


def _only_adds_a_store(value: Value, region: Region, stored: dict[Value, list[Node]]) -> bool:
    """Would Inductor compute ``value`` for free in the kernels that read it? It does so if they are
    elementwise and the inputs of ``value`` are in memory anyway."""
    step = next((s for s in region.steps if s.name == value), None)
    names = {o.name for o in region.operands.values()} | set(stored)
    if step is None or any(isinstance(a, str) and a not in names for a in step.args):
        return False
    inside = {*region.values, *region.reduces}
    users = [u for n, v in region.values.items() if v == value for u in n.users]
    return all(u in inside or (elementwise(u) and not renames(u)) for u in users)


def _owner(node: Node, region: Region) -> Node:
    """The op that an alias is another name of: banning only a view would not help."""
    return base(node, lambda n: renames(n) and n.all_input_nodes[0] in region.values)
