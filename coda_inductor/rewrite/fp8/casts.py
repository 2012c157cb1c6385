# SPDX-License-Identifier: Apache-2.0
"""Quantizations become maxima, where epilogues can make them, and one cast for each tensor.

Before::

    q, s = quantize(x, [1], ...); q2, s2 = quantize(x, [0], ...)
    p = scaled_mm(q, w.t(), 1 / s, ...); p2 = scaled_mm(q2.t(), y, 1 / s2.t(), ...)

After::

    m = abs(x); s = scale(amax(m, 1)); s2 = scale(amax(m, 0))       partials of the epilogue of x
    q, qt2 = fp8_cast(x, None, s, ..., s2, ...)                     one read of x
    p = scaled_mm(q, w.t(), 1 / s, ...); p2 = scaled_mm(qt2, y, 1 / s2.t(), ...)

Why it is valid: the maxima and the casts are those of the definition, bit for bit. A factor that a
product reads transposed is written transposed: tensor cores multiply FP8 along K only. Where the
backward pass quantizes what the forward has, the maximum is taken in the forward pass, which reads
or makes the tensor anyway; the backward may compute the tensor itself anew, from rounded values,
and what exceeds the maximum by such a rounding saturates. A norm in front waits (``norms``).

Refuses what is no matrix. Where no kernels run, quantizations are left to be decomposed; so are
those of inference, by rows, of what no epilogue makes (attention's result): Inductor reads it once.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch.fx import Graph, Node

from coda_inductor.fuse.grow import reaches
from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import producer
from coda_inductor.graph.nodes import fake, is_transpose, place
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.rewrite.decompose import decompose_pointwise
from coda_inductor.rewrite.fp8.merge import origin
from coda_inductor.rewrite.fp8.norms import Waiting, wait
from coda_inductor.rewrite.fp8.scales import ROW, Scales, Source
from coda_inductor.runtime.fp8_casts import CAST
from coda_inductor.semantic.fp8 import quantize, scaled_mm


def expand_quantizations(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every quantization, in place, where kernels run, or what stands for
    them, or none do and it is asked what they would be."""
    policy = record.policy
    runs = policy.compiles or policy.options.reference or record.dry
    if not (runs and policy.fuses and _quantizations(graph)):
        return
    decompose_pointwise(graph)
    groups: dict[Any, list[Node]] = {}
    for node in _quantizations(graph):
        if fake(node.args[0]).dim() == 2:
            groups.setdefault(origin(node.args[0]), []).append(node)
        else:
            text = f"it quantizes a tensor of shape {tuple(fake(node.args[0]).shape)}"
            record.refuse("fp8", place(node), refuse("fp8-shape", text))
    scope = Scope(graph)
    for nodes in groups.values():
        waiting = wait(graph, nodes, scope, record)
        scope.refresh(graph)
        _expand(graph, nodes, waiting, scope)
        if waiting is None:
            scope.refresh(graph)
        else:
            waiting.make_again(graph)
            scope = Scope(graph)  # for what is made again in the backward pass
    graph.eliminate_dead_code()


def divides(node: Node) -> bool:
    """Does the quantization ``node`` divide by its scale?"""
    return len(node.args) > 4 and bool(node.args[4])


def _quantizations(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=quantize))


def _expand(graph: Graph, nodes: list[Node], waiting: Waiting | None, scope: Scope) -> None:
    x = nodes[0].args[0] if waiting is None else waiting.h
    gemm = producer(x)
    source = Source(
        x,
        x if waiting is None else waiting.x,
        None if waiting is None else waiting.factor,
        None if waiting is None else waiting.weight,
        gemm is not None and reaches(gemm, x, scope),
        x not in scope.graded,
        fake(nodes[0].args[0]).dtype,
    )
    if _in_one_kernel(nodes, source):
        return
    put = Put(graph, like=x if x.op == "call_function" else nodes[0])
    scales = Scales(put, nodes[0], source, {tuple(node.args[1]) for node in nodes})
    places: dict[tuple, list[Node]] = {}
    for node in nodes:
        key = (node in scope.forward, node in scope.graded, checkpoint(node), divides(node))
        places.setdefault(key, []).append(node)
    for same in places.values():
        _cast(graph, same, source, scales)


def _in_one_kernel(nodes: list[Node], source: Source) -> bool:
    """Are ``nodes`` what one kernel of Inductor's does, that which makes the tensor: maxima of its
    rows, and the cast? Inference quantizes inputs by rows alone."""
    by_rows = all(divides(node) and tuple(node.args[1]) == ROW for node in nodes)
    return by_rows and not source.in_epilogue


def _cast(graph: Graph, nodes: list[Node], source: Source, scales: Scales) -> None:
    """One cast for every pair of results of ``nodes``, one as it lies and one transposed. They are
    alike in whether they divide."""
    x = nodes[0].args[0] if source.factor is None else source.read
    before, plain, turned = nodes[0], [], []
    for node in nodes:
        q, _ = _results(node)
        straight, transposed = _readers(q)
        plain += [(node, straight)] if straight else []
        turned += [(node, transposed)] if transposed else []
    put = Put(graph, like=before)
    scale = {node: scales(tuple(node.args[1]), *node.args[2:]) for node in nodes}
    for pair in itertools.zip_longest(plain, turned):
        given = [(None, None) if one is None else (scale[one[0]], one[0].args[2]) for one in pair]
        with graph.inserting_before(before):
            how = [divides(nodes[0])] if divides(nodes[0]) or source.weight else []
            how += [source.weight] if source.weight else []
            both = put(CAST, x, source.factor, *given[0], *given[1], *how)
            made = [put(operator.getitem, both, i) if given[i][0] else None for i in range(2)]
            back = put.transpose(made[1]) if made[1] is not None else None
        for one, new in zip(pair, (made[0], back), strict=True):
            for reader, old in one[1] if one is not None else ():
                _read(reader, old, new)
    for node in nodes:
        for got in _results(node):
            if got is not None and got.args[1] == 1:
                got.replace_all_uses_with(scale[node])


def _results(node: Node) -> tuple[Node | None, Node | None]:
    """The results in FP8 and the scale, where they are read."""
    found = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return found.get(0), found.get(1)


def _readers(q: Node | None) -> tuple[list[tuple[Node, Node]], list[tuple[Node, Node]]]:
    """(reader, what it reads of q) of those that want rows of q, and of those that want columns:
    products multiply along the dimension with stride one."""
    plain: list[tuple[Node, Node]] = []
    turned: list[tuple[Node, Node]] = []
    for user in q.users if q is not None else ():
        if is_transpose(user):
            for reader in user.users:
                left = reader.target is scaled_mm and reader.args[0] is user
                (turned if left else plain).append((reader, user))
        else:
            right = user.target is scaled_mm and user.args[1] is q
            (turned if right else plain).append((user, q))
    return plain, turned


def _read(reader: Node, old: Node, new: Node) -> None:
    """Let ``reader`` read ``new``, or its transpose where ``old`` is one, in place of ``old``."""
    if is_transpose(old):
        put = Put(old.graph, like=old)
        with old.graph.inserting_before(reader):
            new = new.args[0] if is_transpose(new) else put.transpose(new)
    reader.replace_input_with(old, new)
