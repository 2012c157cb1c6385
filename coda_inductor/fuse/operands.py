# SPDX-License-Identifier: Apache-2.0
"""Which tensors from outside the epilogue of a GEMM can read, and how many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from coda_inductor.graph.gemms import routes_of
from coda_inductor.graph.nodes import fake, label
from coda_inductor.graph.sizes import classify
from coda_inductor.program.dtypes import FLOATS
from coda_inductor.program.operands import KINDS
from coda_inductor.refusal import Refusal, refuse

MAX_TILE_OPERANDS = 3  # each costs a staged M x N tile of shared memory
MAX_VECTORS = 6


def too_many(kinds: Sequence[str], *, paired: bool) -> Refusal | None:
    """The limit of a kernel that operands of these kinds exceed, or None."""
    if paired and "tile" in kinds:
        text = "a paired tile reads only one value per row, one per column, or scalars"
        return refuse("kernel-form", text)
    if kinds.count("tile") > MAX_TILE_OPERANDS:
        return refuse("kernel-form", f"more than {MAX_TILE_OPERANDS} tile operands")
    if len(kinds) > MAX_TILE_OPERANDS + MAX_VECTORS:
        return refuse("kernel-form", f"more than {MAX_VECTORS} vector operands")
    return None


def wider(node: Node, anchor: Node) -> bool:
    """Is ``node`` float64 although the tile of the GEMM ``anchor`` is computed in float32?"""
    return fake(node).dtype == torch.float64 != fake(anchor).dtype


def refusal(node: Node, full: tuple, anchor: Node) -> Refusal | None:
    """The reason why ``node`` cannot be an operand for ``anchor``, viewed as ``full``, or None."""
    tensor = fake(node)
    if not isinstance(tensor, torch.Tensor):
        return refuse("operand-kind", f"{label(node)} is not a tensor")
    if tensor.dtype not in FLOATS:
        return refuse("operand-dtype", f"{label(node)} is {tensor.dtype}, not a floating type")
    if wider(node, anchor):
        return refuse("float64-mixed", f"{label(node)} is float64, the GEMM is not")
    if tensor.device != fake(anchor).device:
        text = f"{label(node)} is on {tensor.device}, the GEMM on {fake(anchor).device}"
        return refuse("operand-device", text)
    if (kind := classify(tensor.shape, full)) is None:
        text = f"{label(node)} broadcasts over part of the leading dimensions"
        return refuse("operand-broadcast", text)
    if KINDS[kind].columns and routes_of(anchor)[0] is not None:
        return refuse("kernel-form", "rows of several experts cannot share a vector of columns")
    return None
