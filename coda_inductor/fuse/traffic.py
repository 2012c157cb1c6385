# SPDX-License-Identifier: Apache-2.0
"""Bytes that a site moves to and from memory, before and after fusion.

A calculation, not a measurement: each kernel reads each of its tensors once and writes each result
once, as if nothing stayed in a cache between kernels and nothing was fetched twice within one.
Before: each GEMM, and one elementwise kernel that reads the products and does all that the epilogue
absorbed. After: the fused kernel, with partials of reductions and copies of weights that must be
concatenated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.fuse.region import Region
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sizes import hint
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.select.config import Config

_PARTIAL = 4  # float32


def bytes_moved(region: Region, config: str) -> tuple[int, int]:
    """(before, after) for a fused region whose kernel has ``config``."""
    pairs = [gemm_inputs(anchor) for anchor in region.anchors]
    left, right = sum(size(a) for a, _ in pairs), sum(size(b) for _, b in pairs)
    products = sum(size(anchor) for anchor in region.anchors)
    stored = region.stored()
    m, n, _ = region.shape
    program = region.program
    stores = sum(hint(m) * n * WIDTHS[store.dtype] for store in program.stores)
    product = sum(size(anchor) for anchor in region.anchors if region.values[anchor] in stored)
    operands = sum(size(node) for node, _ in region.operands)
    reductions = sum(size(node) for node in region.reduces)
    before = left + right + 2 * products + operands + stores - product + reductions
    shared = size(pairs[0][0]) if region.total is None else left
    after = shared + right + operands + stores + _partials(region, config)
    if region.total is not None and not region.in_place:
        after += 2 * right  # the weights are read and written once more
    return before, after


def bytes_plain(anchor: Node) -> int:
    """Bytes that an unfused GEMM moves: its inputs (a bias too) and its product."""
    return size(anchor) + sum(size(node) for node in anchor.all_input_nodes)


def size(node: Node) -> int:
    """Bytes of a tensor, symbolic sizes by their hint; 0 for anything else."""
    tensor: Any = fake(node)
    if not isinstance(tensor, torch.Tensor):
        return 0
    return tensor.element_size() * math.prod(map(hint, tensor.shape))


def _partials(region: Region, config: str) -> int:
    m, n, _ = region.shape
    tile = Config.parse(config)
    total = 0
    for reduce in dict.fromkeys(region.reduces.values()):
        rows, columns = hint(m), n
        if reduce.axis == "row":
            columns = -(-n // tile.tile_n)
        else:
            rows = -(-rows // tile.tile_m)
        total += rows * columns * _PARTIAL
    return total
