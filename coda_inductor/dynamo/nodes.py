# SPDX-License-Identifier: Apache-2.0
"""Helpers for passes on Dynamo's graph: new calls, with recorded values, and running calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import enable_python_dispatcher
from coda_inductor.graph.edit import prune
from coda_inductor.matching import mutates, value


class Put:
    """Puts calls in front of ``like``, a node whose value is a fake tensor, or of another node,
    ``before``, with its metadata."""

    def __init__(self, like: Node, before: Node | None = None):
        self.like, self.before = like, before or like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of a function, or of the method of that name."""
        graph, named = self.like.graph, isinstance(target, str)
        known = torch.fx.node.map_arg((args, kwargs), value)
        mode = value(self.like).fake_mode
        # As Dynamo does: in C++, torch 2.11's matmul asks for numbers where sizes are symbolic.
        with mode, enable_python_dispatcher(), graph.inserting_before(self.before):
            made = (graph.call_method if named else graph.call_function)(target, args, kwargs)
            made.meta = {**self.like.meta, "example_value": run(target, *known)}
        return made

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """``node`` in ``dtype``; itself if that is its dtype."""
        return node if value(node).dtype == dtype else self("to", node, dtype)

    def traced(self, function: Callable[[Any], Any], source: Node) -> Any:
        """The nodes that ``function``, plain torch code, returns for ``source``."""
        known: dict[Node, Node] = {}
        for step in torch.fx.symbolic_trace(function).graph.nodes:
            args, kwargs = torch.fx.node.map_arg((step.args, step.kwargs), known.__getitem__)
            if step.op == "output":
                return args[0]
            known[step] = source if step.op == "placeholder" else self(step.target, *args, **kwargs)
        raise AssertionError("a traced function has an output")


def erase(node: Node) -> None:
    """Erase ``node``, if nothing reads it, and then what only it read, except for nodes that change
    memory."""
    prune([node], mutates)


def run(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function, or of the method of that name, for values."""
    if isinstance(target, str):
        own, *args = args
        target = getattr(own, target)
    return target(*args, **kwargs)
