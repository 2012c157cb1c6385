# SPDX-License-Identifier: Apache-2.0
"""Give gradients to optimizers within the backward pass (``optim.in_backward``).

Before::

    backward: dx = dy @ w.T; dw = dy.T @ x; dv = ...; return dw, dv, dx

After::

    backward: dx = dy @ w.T; dw = dy.T @ x; give_gradient_(w, dw); dv = ...; return None, dv, dx

Why it is valid: the gradient has no other reader, and nothing in the backward graph reads the
weight afterwards, under any name, or in the kernel of a later node. ``give_gradient_`` writes to
the weight, so that Inductor keeps that order. Gradients that something else reads stay, and those
of weights that the graph writes to, or that results are computed from without a product in between.

torch's partitioner drops ops without results. So the joint graph holds the gradient in an op with
one, which also makes it keep the weight for the backward pass; it is replaced after the split.
"""

from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node

from coda_inductor.graph.aliases import WRITTEN
from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import TRACED
from coda_inductor.graph.nodes import aten, bytes_of, fake
from coda_inductor.graph.walk import closure
from coda_inductor.memory.candidates import owner
from coda_inductor.optim import GIVE, HOLD

#: Gradients of fewer bytes wait for the end: elementwise ops read such weights (of norms), and
#: Inductor would have to write their results to memory before the update.
_SMALL = 2**20
#: They run as they stand, after what they read is in memory; a bias may be added by another kernel.
_PRODUCTS = {*TRACED, aten.bmm.default} - {aten.addmm.default}


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


def give(forward: GraphModule, backward: GraphModule, outputs: int) -> None:
    """Replace held gradients in a backward graph by :data:`~coda_inductor.optim.GIVE`, in place.
    ``outputs``: how many outputs of the ``forward`` graph are not for the backward graph."""
    graph = backward.graph
    holds = list(graph.find_nodes(op="call_function", target=HOLD))
    if not holds:
        return
    inputs = _weights(forward.graph, graph, outputs)
    output = graph.output_node()
    results = list(output.args[0])
    for node in holds:
        weight, gradient = node.args
        last = _last_kernel([n for n, of in inputs.items() if of is weight])
        given = last is not output
        results[results.index(node)] = None if given else gradient
        if given:
            small = bytes_of(gradient) < _SMALL
            with graph.inserting_before(output if small else max(gradient, last).next):
                graph.call_function(GIVE, (weight, gradient)).meta = {**node.meta, "val": None}
    output.args = (tuple(results),)
    for node in holds:
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


def _last_kernel(weights: list[Node]) -> Node:
    """The last node in whose kernel Inductor may read ``weights``, names of one weight: what is no
    product may become part of the kernel of any of its readers, after an update that is between."""

    def step(node: Node) -> list[Node]:
        ours = getattr(node.target, "namespace", "") == "coda_inductor"
        if ours or node.target in _PRODUCTS:
            return []
        return [user for user in node.users if user.target is not HOLD]

    return max(closure(weights, step))
