# SPDX-License-Identifier: Apache-2.0
"""Remove assertions of exported programs that hold, because they hide idioms as further readers.

Before::

    to = aten.to.dtype(x, torch.float32)
    aten._assert_tensor_metadata.default(to, dtype=torch.float32)

After::

    to = aten.to.dtype(x, torch.float32)

Why it is valid: dtype, device and layout are the same at every call. Leaves alone: assertions of
sizes and strides, which may be symbolic; assertions that do not hold, which raise when they are
traced.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.nodes import arguments, fake
from coda_inductor.graph.read import op_name
from coda_inductor.matching import bodies
from coda_inductor.record import Record


def drop_assertions(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    for body in bodies(graph):
        for node in list(body.graph.nodes):
            if op_name(node) == "_assert_tensor_metadata" and _holds(node):
                body.graph.erase_node(node)


def _holds(node: Node) -> bool:
    expected = {name: item for name, item in arguments(node).items() if item is not None}
    tensor = fake(expected.pop("a"))
    if not isinstance(tensor, torch.Tensor) or not expected.keys() <= {"dtype", "device", "layout"}:
        return False
    device = torch.device(expected.pop("device", tensor.device))
    same_device = device.type == tensor.device.type and device.index in (None, tensor.device.index)
    return same_device and all(getattr(tensor, name) == item for name, item in expected.items())
