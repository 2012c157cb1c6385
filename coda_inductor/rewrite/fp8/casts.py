# SPDX-License-Identifier: Apache-2.0
"""Quantizations become maxima, where epilogues can compute them, and one cast for each tensor.

Before::

    q, i = quantize(x, [1], ...); q2, i2 = quantize(x, [0], ...)
    p = scaled_mm(q, w.t(), i, ...); p2 = scaled_mm(q2.t(), y, i2.t(), ...)

After::

    m = abs(x); s = scale(amax(m, 1)); s2 = scale(amax(m, 0))       partials of the epilogue of x
    q, qt2 = fp8_cast(x, None, s, ..., s2, ...)                     one read of x
    p = scaled_mm(q, w.t(), 1 / s, ...); p2 = scaled_mm(qt2, y, 1 / s2.t(), ...)

Why it is valid: maxima and casts equal the definition's, bit for bit. A factor that a product reads
transposed is written transposed: tensor cores multiply FP8 along K only. If the backward pass
quantizes a tensor of the forward pass, the forward pass computes the maximum, because it reads or
computes the tensor anyway. The backward pass may recompute the tensor from rounded values; values
that exceed the maximum by a rounding then saturate. A norm before it is deferred (``norms``).

Without kernels, quantizations are left to be decomposed. In inference this also holds for tensors
that no epilogue computes (results of LayerNorm or attention), because a kernel of Inductor's
computes them with their rows' maxima; the tensor's maximum is the maximum of these. If the tensor
is a concatenation and an epilogue computes one of its parts (FLUX's MLP beside attention), the
maxima are computed from the parts. Only the cast reads the concatenation then, and Inductor
computes both in one kernel. A tensor that no epilogue computes is also left where only rows are
scaled, by no power of two (frozen weights): Inductor computes it, its maxima and the cast in one.
"""

import itertools
import operator
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, replace_parts
from coda_inductor.graph.gemms import gemm_inputs, producer
from coda_inductor.graph.nodes import arguments, aten, fake, is_transpose
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.splice import splice
from coda_inductor.graph.walk import parts as results
from coda_inductor.record import Record
from coda_inductor.rewrite.concatenated import columns_of, in_epilogue
from coda_inductor.rewrite.decompose import decompose_pointwise
from coda_inductor.rewrite.fp8.norms import recompute, wait
from coda_inductor.rewrite.fp8.raising import origin
from coda_inductor.rewrite.fp8.scales import ALL, ROW, Source, scaled, scales
from coda_inductor.semantic.fp8 import KIND, quantize, quantize_by_rows, scaled_mm
from coda_inductor.semantic.fp8_casts import CAST

if TYPE_CHECKING:
    from coda_inductor.sites import Sites


def expand_quantizations(graph: Graph, record: Record) -> None:
    """Expand every quantization, in place, if kernels or their reference run, or in a dry run."""
    plan = record.plan
    runs = plan.compiles or plan.options.reference or record.dry
    if not (runs and plan.fuses and _quantizations(graph)):
        return
    decompose_pointwise(graph)
    groups: dict[Any, list[Node]] = {}
    for node in _quantizations(graph):
        groups.setdefault(origin(arguments(node)["x"]), []).append(node)
    scope = Scope(graph)
    for nodes in groups.values():
        waiting = wait(nodes, scope, record)
        scope.refresh()
        x = arguments(nodes[0])["x"]
        _expand(nodes, waiting or scaled(x) or Source(x, x), scope, record.sites)
        if waiting is None:
            scope.refresh()
        else:
            recompute(waiting)
            scope = Scope(graph)  # for what the backward pass recomputes
    graph.eliminate_dead_code()


def _quantizations(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=quantize))


def _expand(nodes: list[Node], source: Source, scope: Scope, sites: "Sites") -> None:
    x, gemm = source.x, producer(source.x)
    absorbed = gemm is not None and sites.absorbs(gemm, x, scope)
    calls = {node: arguments(node) for node in nodes}
    kinds = {tuple(call["dims"]) for call in calls.values()}
    if not absorbed and kinds <= {ROW, ALL} and all(call["divides"] for call in calls.values()):
        parts = columns_of(x)
        parts = parts if in_epilogue(parts, scope, sites) else []
        for node, call in calls.items() if parts or ALL in kinds else ():
            put = Put(node)
            rows = [put.reshape(part, [-1, fake(part).shape[-1]]) for part in parts] or [x]
            kind = [call[name] for name in KIND]
            replace_parts(node, splice(node, quantize_by_rows, [x, rows, call["dims"], *kind]))
        return
    # torchao's recipes of training round scales to powers of two.
    frozen = not any(call["power_of_two"] for call in calls.values())
    if not absorbed and source.factor is None and kinds == {ROW} and frozen:
        return
    put = Put(x if x.op == "call_function" else nodes[0], nodes[0])
    scale = scales(put, calls, source, in_epilogue=absorbed, forward=x not in scope.graded)
    groups: dict[tuple, list[Node]] = {}
    for node, call in calls.items():
        key = (node in scope.forward, node in scope.graded, checkpoint(node), call["divides"])
        groups.setdefault(key, []).append(node)
    for same in groups.values():
        _cast(same, source, scale)


def _cast(nodes: list[Node], source: Source, scale: dict[Node, Node]) -> None:
    """Insert one cast for every pair of results of ``nodes``, one in the tensor's layout and one
    transposed. Either all divide by their scales or none does."""
    put, divide = Put(nodes[0]), arguments(nodes[0])["divides"]
    layouts: list[list[tuple[Any, Any]]] = [[], []]
    for node in nodes:
        for i, readers in enumerate(_readers(node)):
            if readers:
                layouts[i].append((node, readers))
    for pair in itertools.zip_longest(*layouts, fillvalue=(None, ())):
        specs = [
            (None, None) if node is None else (scale[node], arguments(node)["dtype"])
            for node, _ in pair
        ]
        args = source.factor, *specs[0], *specs[1], divide, source.weight
        cast = put(CAST, source.read, *args)
        for i, (node, readers) in enumerate(pair):
            if node is not None:
                result = put(operator.getitem, cast, i)
                other = put.transpose(result)
            for reader, old in readers:
                reader.replace_input_with(old, result if is_transpose(old) == bool(i) else other)
    for node in nodes:
        if (inverse := results(node).get(1)) is not None:
            undoes = scale[node]
            if not divide:
                undoes = Put(inverse)(aten.reciprocal.default, undoes)
            inverse.replace_all_uses_with(undoes)


def _readers(node: Node) -> list[list[tuple[Node, Node]]]:
    """[pairs for rows, pairs for columns]: each pair is a reader and the node that it reads.
    Products multiply along the dimension with stride 1."""
    pairs: list[list[tuple[Node, Node]]] = [[], []]
    if (q := results(node).get(0)) is not None:
        for name in (q, *filter(is_transpose, q.users)):
            for user in name.users:
                right = user.target is scaled_mm and gemm_inputs(user)[name is q] is name
                if not is_transpose(user):
                    pairs[right].append((user, name))
    return pairs
