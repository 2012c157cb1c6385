# SPDX-License-Identifier: Apache-2.0
"""What passes on Dynamo's graph share: new calls with recorded values, and what casts are of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from coda_inductor.matching import normalize, value


class Put:
    """Puts calls in front of ``like``, a node whose value is a fake tensor, with its metadata."""

    def __init__(self, like: Node):
        self.like = like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of a function, or of the method of that name."""
        graph, named = self.like.graph, isinstance(target, str)
        known = torch.fx.node.map_arg((args, kwargs), value)
        with value(self.like).fake_mode, graph.inserting_before(self.like):
            made = (graph.call_method if named else graph.call_function)(target, args, kwargs)
            call = getattr(Tensor, target) if named else target
            made.meta = {**self.like.meta, "example_value": call(*known[0], **known[1])}
        return made


def uncast(node: Node) -> Node:
    """What ``node`` is a cast of, however often."""
    while (canon := normalize(node)) is not None and canon.op == "cast":
        node = canon.args[0]
    return node
