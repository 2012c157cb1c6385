# SPDX-License-Identifier: Apache-2.0
"""A norm that vectors of a time step modulate becomes a norm with a weight and a bias.

Before (scale and shift, from a projection of the time step: one vector for all rows, (d,), or for
each row of a batch, (B, 1, d))::

    y = layer_norm(x, weight, bias, eps) * (1 + scale) + shift         # or rms_norm(x, weight, eps)

After::

    y = layer_norm(x, weight * (1 + scale), bias * (1 + scale) + shift, eps)

Why it is valid: it is the definition of the op's weight and bias. y is rounded once; the sum and
the product are computed in float32 like the norm. 1 + scale is float32 too, as in a kernel of
Inductor's, because in memory it would be rounded.

What it enables: rules R1 and R5 (``forward``), for which a weight need not be a parameter.

Leaves alone: norms whose result has other readers, or whose statistics a gradient reads; RMSNorms,
and norms with a weight, that no GEMM reads (``gate * norm(x)`` after a projection); vectors of a
batch with fewer rows than a kernel's tile (``program.ir``).
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, replace
from coda_inductor.graph.gemms import DENSE
from coda_inductor.graph.nodes import arguments, fake, renames_or_casts
from coda_inductor.graph.read import called
from coda_inductor.graph.sizes import classify, same
from coda_inductor.graph.walk import only_reader, parts, readers
from coda_inductor.program.dtypes import HALF
from coda_inductor.record import Record
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import biased_rms_norm, layer_norm, rms_norm


def take_vectors(graph: Graph, record: Record) -> None:
    """Turn the vectors around norms of an aten graph into weights and biases, in place."""
    for norm in [n for n in graph.nodes if n.target in (layer_norm, rms_norm)]:
        args, results = arguments(norm), parts(norm)
        if [*results] != [0]:
            continue
        scaled, scale = _by_row(results[0], "mul")
        shifted, shift = _by_row(scaled or results[0], "add")
        if (last := shifted or scaled) is None:
            continue
        put, vectors = Put(last), [args["weight"], args.get("bias")]
        _, users = readers(last, renames_or_casts)
        bare = norm.target is layer_norm and not any(vectors)
        if not bare and not any(user.target in DENSE for user in users):
            continue
        if scale is not None:
            factor = _wide(put, scale)
            vectors = [v and put.mul(_float(put, v), factor) for v in vectors]
            vectors[0] = vectors[0] or factor
        if shift is not None:
            vectors[1] = put.add(_float(put, vectors[1]), shift) if vectors[1] else shift
        op = biased_rms_norm if norm.target is rms_norm and vectors[1] else norm.target
        vectors = vectors[:1] if op is rms_norm else vectors
        new = put(op, args["x"], *vectors, args["eps"], fake(last).dtype)
        replace(last, put(operator.getitem, new, 0))
        record.fire("modulated")


def _float(put: Put, vector: Node) -> Node:
    return put.cast(vector, statistics_dtype(fake(vector).dtype))


def _by_row(y: Node, op: str) -> tuple[Node | None, Node | None]:
    """(the only reader of ``y``, a vector) if the reader applies ``op`` to y and a vector with one
    value per column; else (None, None)."""
    reader = only_reader(y, renames_or_casts)
    call = called(reader, op)
    if reader is None or call is None or not same(fake(reader).shape, fake(y).shape):
        return None, None
    vectors = [v for v in reader.all_input_nodes if _is_vector(fake(v), fake(y))]
    return (reader, vectors[0]) if len(vectors) == 1 else (None, None)


def _wide(put: Put, vector: Node) -> Node:
    """``vector``; in float32 if it is the sum of a number and a vector of fewer bits."""
    call = called(vector, "add")
    if call is None or fake(vector).dtype not in HALF or not isinstance(call["input"], Node):
        return vector
    if isinstance(call["other"], Node):
        return vector
    return put.add(put.cast(call["input"], torch.float32), call["other"])


def _is_vector(v: Any, y: torch.Tensor) -> bool:
    """Does ``v`` have one value per column of ``y`` (and batch), and no more bits than the norm?"""
    if not isinstance(v, torch.Tensor) or not v.is_floating_point():
        return False
    narrow = v.dtype == y.dtype or v.dtype != torch.float64
    return narrow and classify(v.shape, y.shape) in ("row", "batch")
