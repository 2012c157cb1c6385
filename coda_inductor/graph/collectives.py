# SPDX-License-Identifier: Apache-2.0
"""Collectives in aten graphs: their readers need the results of all ranks' GEMMs.

Tracing through DTensor gives local tensors and torch's functional collectives: ``all_reduce``,
``reduce_scatter_tensor`` and ``all_gather_into_tensor``, each followed by ``wait_tensor``.
"""

from typing import Any

from torch.fx import Node

from coda_inductor import compat
from coda_inductor.graph.nodes import renames_or_casts
from coda_inductor.graph.read import kind, op_name
from coda_inductor.graph.walk import base
from coda_inductor.refusal import Refusal, refuse

#: Collectives whose result is a sum over ranks if their second argument says so.
SUMS = (compat.all_reduce, compat.reduce_scatter_tensor)
COLLECTIVES = (*SUMS, compat.all_gather_into_tensor)
_FAR = 64


def is_wait(node: Any) -> bool:
    """Does ``node`` wait for a collective?"""
    return isinstance(node, Node) and node.target is compat.wait_tensor


def moves(node: Any) -> bool:
    """Does ``node`` only move or rename elements, or wait for them? DTensor moves them around a
    collective whose dimension is not the first."""
    if op_name(node) == "getitem":
        node = node.all_input_nodes[0]
    layout_only = kind(node) in ("turns", "parts", "joins", "copies")
    return layout_only or is_wait(node) or renames_or_casts(node)


def ahead(node: Node) -> Node | None:
    """The collective that ``node`` is, or whose input ``node`` is moved to; None for others."""
    todo = [node]
    for _ in range(_FAR):
        if not todo:
            break
        reader = todo.pop(0)
        if reader.target in COLLECTIVES:
            return reader
        if moves(reader):
            todo += reader.users
    return None


def overlap(gemm: Node) -> Refusal | None:
    """Why ``gemm`` must not be fused, or None: Inductor's asynchronous tensor parallelism, if it is
    on, splits the GEMM to overlap it with a collective."""
    if not compat.micro_pipeline():
        return None
    before = [base(a, moves).target for a in gemm.all_input_nodes]
    after = [c.target for user in gemm.users if (c := ahead(user)) is not None]
    if compat.all_gather_into_tensor not in before and compat.reduce_scatter_tensor not in after:
        return None
    text = "Inductor's asynchronous tensor parallelism is on, and overlaps it with its collective"
    return refuse("async-tensor-parallel", text)
