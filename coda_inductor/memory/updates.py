# SPDX-License-Identifier: Apache-2.0
"""Give gradients to optimizers within the backward pass (``optim.in_backward``).

Before::

    backward: dx = dy @ w.T; dw = dy.T @ x; dv = ...; return dw, dv, dx

After::

    backward: dx = dy @ w.T; dw = dy.T @ x; give_gradient(w, dw); dv = ...; return None, dv, dx

Why it is valid: the gradient has no other reader, and nothing in the backward graph reads the
weight afterwards, under any name. ``give_gradient`` writes to the weight, so that Inductor keeps
that order. Gradients that something else reads, and weights that the graph writes to, stay.

torch's partitioner drops ops without results. So the joint graph holds the gradient in an op with
one, which also makes it keep the weight for the backward pass; it is replaced after the split.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node

from coda_inductor.graph.aliases import WRITTEN
from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import fake, may_view
from coda_inductor.optim import GIVE, HOLD


def hold(graph: Graph, outputs: int, places: Sequence[int], inputs: int) -> int:
    """Hold the gradients of the inputs at ``places`` of a joint graph with so many ``inputs`` and
    forward ``outputs``, in place. Returns how many."""
    primals = [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("primals")]
    output = graph.output_node()
    results = list(output.args[0])
    if len(primals) != inputs or len(results) != outputs + inputs:
        return 0  # AOTAutograd took subclasses apart: positions are not Dynamo's
    held = 0
    for i in places:
        weight, gradient = primals[i], results[outputs + i]
        if not isinstance(gradient, Node) or gradient.op == "placeholder":
            continue
        if weight.meta.get(WRITTEN) or results.count(gradient) > 1:
            continue
        if fake(weight).shape != fake(gradient).shape:
            continue
        results[outputs + i] = Put(gradient, gradient.next)(HOLD, weight, gradient)
        held += 1
    output.args = (tuple(results),)
    return held


def give(backward: GraphModule) -> None:
    """Replace held gradients in a backward graph by :data:`~coda_inductor.optim.GIVE`, in place."""
    graph = backward.graph
    holds = list(graph.find_nodes(op="call_function", target=HOLD))
    if not holds:
        return
    last = _last_readers(graph, {node.args[0] for node in holds})
    order = {node: i for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    output.args = (tuple(None if n in holds else n for n in output.args[0]),)
    for node in holds:
        weight, gradient = node.args
        after = max((gradient, last[weight], node), key=order.__getitem__)
        with graph.inserting_after(after):
            graph.call_function(GIVE, (weight, gradient)).meta = {**node.meta, "val": None}
        graph.erase_node(node)
    backward.recompile()


def _last_readers(graph: Graph, weights: set[Node]) -> dict[Node, Node]:
    """The last node that reads each weight, itself or through views; the weight if none does."""
    of = {weight: weight for weight in weights}
    last = dict(of)
    for node in graph.nodes:
        if node.op == "output":
            continue
        for read in node.all_input_nodes:
            if read in of:
                last[of[read]] = node
                if node.target is not HOLD and may_view(node):
                    of[node] = of[read]
    return last
