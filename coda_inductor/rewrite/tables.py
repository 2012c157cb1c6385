# SPDX-License-Identifier: Apache-2.0
"""Compute sines and cosines that multiply many larger tensors only once.

Before::

    q2 = q * cos(angles) + ...;  k2 = k * cos(angles) + ...        in every layer, and backward

After::

    c = keep(cos(angles)); q2 = q * c + ...;  k2 = k * c + ...

Why: Inductor recomputes elementwise values in each kernel that reads them, and torch's partitioner
recomputes them in the backward pass. That is right if it saves traffic. But a rotary table then
costs the sine of a large angle per value, in each head of each layer: measured on an H100, the
rotary gradient of a Llama layer took 342 us instead of the 40 us that its traffic takes.

A table is kept only if tensors of at least ``LEAST_READS`` times its size read it. Its views, casts
and copies do not count, but their readers do. Rotations of heads that an epilogue may absorb
(``rewrite.heads``) have their own tables: a rotation that is not absorbed is decomposed, and the
pass, which then runs again, sees its reads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.compat import tree_flatten
from coda_inductor.graph.edit import Put, replace
from coda_inductor.graph.nodes import aten, fake, is_cast, may_view, renames_or_casts
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import only_reader, readers
from coda_inductor.record import Record
from coda_inductor.semantic.define import opaque
from coda_inductor.semantic.rotary import rotate_heads

LEAST_READS = 8

#: A copy that compilers do not look into.
KEEP = opaque("keep(Tensor x) -> Tensor", torch.clone, torch.empty_like)
_SLOW = (aten.sin.default, aten.cos.default)


def keep_tables(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to a joint or inference graph, in place."""
    for node in [n for n in graph.nodes if n.target in _SLOW]:
        table = _end(node)
        if table.target is KEEP or not _is_shared(table):
            continue
        replace(table, Put(table, table.next)(KEEP, table))


def _end(node: Node) -> Node:
    """The last cast, scaling or view of ``node`` that all its readers go through; or the copy of
    ``node``, if one is kept already."""
    while (user := only_reader(node)) is not None and node.target is not KEEP:
        scales = user.target is aten.mul.Tensor and len(user.all_input_nodes) == 1
        if not (scales or renames_or_casts(user) or user.target is KEEP):
            break
        node = user
    return node


def _is_shared(table: Node) -> bool:
    elements = hint(fake(table).numel())
    _, users = readers(table, _moves)
    sizes = [_size(user) for user in users if user.target is not rotate_heads]
    return sum(sizes) >= LEAST_READS * elements and any(size > elements for size in sizes)


def _size(user: Node) -> int:
    """The number of elements of the largest result of ``user``."""
    results = [x for x in tree_flatten(fake(user))[0] if isinstance(x, Tensor)]
    return max((hint(x.numel()) for x in results), default=0)


def _moves(node: Node) -> bool:
    return may_view(node) or is_cast(node) or node.target is aten.clone.default
