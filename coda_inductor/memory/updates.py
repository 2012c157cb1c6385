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
from coda_inductor.graph.nodes import bytes_of, fake
from coda_inductor.memory.candidates import owner
from coda_inductor.optim import GIVE, HOLD

#: Gradients of fewer bytes wait for the end: elementwise ops read such weights (of norms), and
#: Inductor would have to write their results to memory before the update.
_SMALL = 2**20


def hold(graph: Graph, outputs: int, places: Sequence[int], inputs: int) -> int:
    """Hold the gradients of the inputs at ``places`` of a joint graph with so many ``inputs`` and
    forward ``outputs``, in place. Returns how many."""
    primals = [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("primals")]
    output = graph.output_node()
    results = list(output.args[0])
    if len(primals) != inputs or len(results) != outputs + inputs:
        return 0  # AOTAutograd took subclasses apart: positions are not Dynamo's
    last = _last_readers(graph, {n: n for n in primals})
    held = 0
    for i in places:
        weight, gradient = primals[i], results[outputs + i]
        if not isinstance(gradient, Node) or gradient.op == "placeholder":
            continue
        if weight.meta.get(WRITTEN) or results.count(gradient) > 1:
            continue
        if fake(weight).shape != fake(gradient).shape:
            continue
        after = max(gradient, last[weight])  # where it dies, for the planner
        results[outputs + i] = Put(gradient, after.next)(HOLD, weight, gradient)
        held += 1
    output.args = (tuple(results),)
    return held


def give(forward: GraphModule, backward: GraphModule, outputs: int) -> None:
    """Replace held gradients in a backward graph by :data:`~coda_inductor.optim.GIVE`, in place.
    ``outputs``: how many outputs of the ``forward`` graph are not for the backward graph."""
    graph = backward.graph
    holds = list(graph.find_nodes(op="call_function", target=HOLD))
    if not holds:
        return
    last = _last_readers(graph, _weights(forward.graph, graph, outputs))
    output = graph.output_node()
    output.args = (tuple(None if n in holds else n for n in output.args[0]),)
    for node in holds:
        weight, gradient = node.args
        small = bytes_of(gradient) < _SMALL
        with graph.inserting_before(output if small else max(gradient, last[weight]).next):
            graph.call_function(GIVE, (weight, gradient)).meta = {**node.meta, "val": None}
        graph.erase_node(node)
    # Inductor's matcher moves no reader across a write, but had numbered the writes before there
    # were any: mm + add became an addmm behind the update of its weight.
    for node in graph.nodes:
        node.meta.pop("mutation_region_id", None)
    backward.recompile()


def _weights(forward: Graph, backward: Graph, outputs: int) -> dict[Node, Node]:
    """Input of the backward graph -> the input whose memory it has: itself, or the weight that the
    forward pass keeps a view of."""
    inputs = {n.name: n for n in backward.find_nodes(op="placeholder")}
    kept = forward.output_node().args[0][outputs:]
    owners = {n.name: owner(n).name for n in kept if isinstance(n, Node)}
    return {n: inputs.get(owners.get(name, name), n) for name, n in inputs.items()}


def _last_readers(graph: Graph, inputs: dict[Node, Node]) -> dict[Node, Node]:
    """The last node that reads each of the values of ``inputs``, under any name; it if none does."""
    last = {value: value for value in inputs.values()}
    for node in graph.nodes:
        if node.op != "output" and node.target is not HOLD:
            for read in node.all_input_nodes:
                if (value := inputs.get(owner(read))) is not None:
                    last[value] = node
    return last
