# SPDX-License-Identifier: Apache-2.0
"""An RMSNorm that a vector of a time step scales becomes one with another weight.

Before (scale, from a projection of the time step: one vector for all rows, (d,), or for each row
of a batch, (B, 1, d))::

    y = rms_norm(x, weight, eps) * (1 + scale)

After::

    y = rms_norm(x, weight * (1 + scale), eps)

Why it is valid: it is the definition of the op's weight. y is rounded once, and 1 + scale is
float32, as in a kernel of Inductor's, because in memory it would be rounded.

What it enables: rule R1 (``forward``), for which a weight need not be a parameter.

Leaves alone: norms whose result has other readers, or whose statistics a gradient reads; norms that
no GEMM reads (``gate * norm(x)`` after a projection), also where a shift is added before that;
vectors of a batch with fewer rows than a kernel's tile (``program.ir``).
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
from coda_inductor.semantic.norms import rms_norm


def take_scales(graph: Graph, record: Record) -> None:
    """Turn the vectors that scale RMSNorms of an aten graph into their weights, in place."""
    for norm in [n for n in graph.nodes if n.target is rms_norm]:
        args, results = arguments(norm), parts(norm)
        y = only_reader(results[0], renames_or_casts) if [*results] == [0] else None
        if y is None or called(y, "mul") is None or not same(fake(y).shape, fake(norm)[0].shape):
            continue
        vectors = [v for v in y.all_input_nodes if _is_vector(fake(v), fake(y))]
        _, users = readers(y, renames_or_casts)
        if len(vectors) != 1 or not any(user.target in DENSE for user in users):
            continue
        put = Put(y)
        weight = _wide(put, vectors[0])
        if args["weight"] is not None:
            dtype = statistics_dtype(fake(args["weight"]).dtype)
            weight = put.mul(put.cast(args["weight"], dtype), weight)
        new = put(rms_norm, args["x"], weight, args["eps"], fake(y).dtype)
        replace(y, put(operator.getitem, new, 0))
        record.fire("modulated")


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
