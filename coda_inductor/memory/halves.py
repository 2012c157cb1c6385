# SPDX-License-Identifier: Apache-2.0
"""Compute one half of a pair again without the other.

A paired GEMM computes gate and up in one kernel, and stores both for the backward pass. If only one
of them is freed, the pair would compute both again. So each of them that depends on only one
product gets a call with that product alone, of the same config: its accumulators are sums over K in
the same order, and so its results have the same bits (a GPU test compares them).

Before::

    a, g, u = gemm_epilogue([x], [Wg, Wu], ...)

Added, so that the planner can let the backward pass read u' instead of u::

    u' = gemm_epilogue([x], [Wu], ...)
"""

import operator
from collections.abc import Collection
from dataclasses import replace

from torch.fx import Graph, Node

from coda_inductor.gpu import Gpu
from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments
from coda_inductor.kernels import OP, has_config
from coda_inductor.program import EpilogueProgram


def add_halves(graph: Graph, backward: Collection[Node], gpu: Gpu) -> dict[Node, Node]:
    """Add the halves of all pairs of ``graph`` that only nodes of ``backward`` read. Returns each
    result of a pair with the new node, without readers, that computes it alone."""
    halves: dict[Node, Node] = {}
    for pair in graph.find_nodes(op="call_function", target=OP):
        program = EpilogueProgram.from_json(arguments(pair)["program"])
        if not program.paired or program.grouped or program.fp8:
            continue
        for user in pair.users:
            index = arguments(user)["index"]
            if index < len(program.stores) and all(reader in backward for reader in user.users):
                half = _half(pair, program, index, gpu)
                halves |= {} if half is None else {user: half}
    return halves


def half_of(program: EpilogueProgram, index: int) -> tuple[EpilogueProgram, int, list[int]] | None:
    """A program of one product that stores output ``index`` of the pair ``program``, the number of
    that product, and the positions of the operands that it reads.

    None if the store needs both products, or reads row vectors, whose values alternate in a pair.
    """
    store = program.stores[index]
    names = program.sources([store.value])
    accs = [acc for acc in program.accs if acc in names]
    positions = [i for i, operand in enumerate(program.operands) if operand.name in names]
    if len(accs) != 1 or any(program.operands[i].spec.columns for i in positions):
        return None

    def rename(value):
        return "acc" if value == accs[0] else value

    steps = (step for step in program.steps if step.name in names)
    half = replace(
        program,
        accs=("acc",),
        operands=tuple(program.operands[i] for i in positions),
        steps=tuple(replace(step, args=tuple(map(rename, step.args))) for step in steps),
        stores=(replace(store, value=rename(store.value)),),
        reduces=(),
    )
    return half, program.accs.index(accs[0]), positions


def _half(pair: Node, program: EpilogueProgram, index: int, gpu: Gpu) -> Node | None:
    """A node that computes output ``index`` of ``pair`` alone; None if no kernel can."""
    parts, call = half_of(program, index), arguments(pair)
    if parts is None or not has_config(parts[0], call["config"], gpu.arch):
        return None
    half, product, positions = parts
    operands, bs = [call["operands"][i] for i in positions], [call["bs"][product]]
    others = half.to_json(), call["config"], call["site"], call["strict"]
    half_call = Put(pair, pair.next)(OP, call["as_"], bs, operands, *others)
    return Put(pair, half_call.next)(operator.getitem, half_call, 0)
