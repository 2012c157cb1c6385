# SPDX-License-Identifier: Apache-2.0
"""A LayerNorm that vectors of a time step modulate becomes a LayerNorm with a weight and a bias.

Before (scale and shift, from a projection of the time step: one vector for all rows, (d,), or for
each row of a batch, (B, 1, d))::

    y = layer_norm(x, None, None, eps) * (1 + scale) + shift

After::

    y = layer_norm(x, 1 + scale, shift, eps)

Why it is valid: it is the definition of the op's weight and bias. y is rounded once; the sum and
the product are computed in float32 like the norm. 1 + scale is float32 too, as in a kernel of
Inductor's, because in memory it would be rounded.

What it enables: rule R5 (``forward``), for which a weight need not be a parameter.

Leaves alone: norms with a weight of their own, or whose result has other readers (the gradient of
scale); vectors of a batch with fewer rows than a kernel's tile (``program.ir``).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.nodes import arguments, fake, renames_or_casts
from coda_inductor.graph.read import called
from coda_inductor.graph.sizes import hint, same
from coda_inductor.graph.walk import only_reader, parts
from coda_inductor.program.dtypes import HALF
from coda_inductor.program.ir import LEAST_PART
from coda_inductor.record import Record
from coda_inductor.semantic.norms import layer_norm


def take_vectors(graph: Graph, record: Record) -> None:
    """Turn the vectors around LayerNorms of an aten graph into weights and biases, in place."""
    for norm in graph.find_nodes(op="call_function", target=layer_norm):
        args, results = arguments(norm), parts(norm)
        if args["weight"] is not None or args["bias"] is not None or [*results] != [0]:
            continue
        scaled, weight = _by_row(results[0], "mul")
        if scaled is None:
            continue
        shifted, bias = _by_row(scaled, "add")
        last, put = shifted or scaled, Put(shifted or scaled)
        new = put(layer_norm, args["x"], _wide(put, weight), bias, args["eps"], fake(last).dtype)
        last.replace_all_uses_with(put(operator.getitem, new, 0))
        prune([last])
        record.fire("modulated")


def _by_row(y: Node, op: str) -> tuple[Node | None, Node | None]:
    """(the only reader of ``y``, a vector) if the reader applies ``op`` to y and a vector with one
    value per column; else (None, None)."""
    reader = only_reader(y, renames_or_casts)
    call = called(reader, op)
    if reader is None or call is None or call.get("alpha") not in (None, 1):
        return None, None
    if not same(fake(reader).shape, fake(y).shape):
        return None, None
    vectors = [v for v in reader.all_input_nodes if _is_vector(fake(v), fake(y).shape)]
    return (reader, vectors[0]) if len(vectors) == 1 else (None, None)


def _wide(put: Put, vector: Node) -> Node:
    """``vector``; in float32 if it is the sum of a number and a vector of fewer bits."""
    call = called(vector, "add")
    if call is None or fake(vector).dtype not in HALF or not isinstance(call["input"], Node):
        return vector
    if isinstance(call["other"], Node) or call.get("alpha") not in (None, 1):
        return vector
    return put.add(put.cast(call["input"], torch.float32), call["other"])


def _is_vector(v: Any, shape: torch.Size) -> bool:
    """Does ``v`` have one value per column of a tensor of ``shape``, or one for each batch?"""
    if not isinstance(v, torch.Tensor) or not v.is_floating_point():
        return False
    if not 0 < v.dim() <= len(shape):
        return False
    batch, *tokens, width = (*[1] * (len(shape) - v.dim()), *v.shape)
    if not same(width, shape[-1]) or not all(same(size, 1) for size in tokens):
        return False
    large = hint(math.prod(shape[1:-1])) >= LEAST_PART
    return same(batch, 1) or (large and same(batch, shape[0]))
