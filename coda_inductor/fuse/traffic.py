# SPDX-License-Identifier: Apache-2.0
"""Bytes that a site moves to and from memory, before and after fusion.

The bytes are calculated, not measured: each kernel reads each of its tensors once and writes each
result once, as if no data stayed in a cache between kernels or was loaded twice within one. Before:
each GEMM, and one elementwise kernel that reads the products and does all work that the epilogue
absorbed. After: the fused kernel, with partials of reductions and copies of weights that must be
concatenated.
"""

from __future__ import annotations

from torch.fx import Node

from coda_inductor.fuse.region import Region
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import bytes_of
from coda_inductor.graph.sizes import hint
from coda_inductor.kernels import tile
from coda_inductor.program.dtypes import WIDTHS

_PARTIAL = 4  # float32


def bytes_moved(region: Region, config: str) -> tuple[int, int]:
    """(before, after) for a fused region whose kernel has ``config``."""
    pairs = [gemm_inputs(anchor) for anchor in region.anchors]
    left, right = (bytes_of(*matrices) for matrices in zip(*pairs, strict=True))
    products = bytes_of(*region.anchors)
    stored = region.stored()
    m, n, _ = region.shape
    program = region.program
    stores = sum(hint(m) * n * WIDTHS[store.dtype] for store in program.stores)
    product = bytes_of(*(a for a in region.anchors if region.values[a] in stored))
    operands = bytes_of(*(node for node, _ in region.operands))
    reductions = bytes_of(*region.reduces)
    before = left + right + 2 * products + operands + stores - product + reductions
    shared = bytes_of(pairs[0][0]) if region.total is None else left
    after = shared + right + operands + stores + _partials(region, config)
    if region.total is not None and not region.in_place:
        after += 2 * right  # the weights are read and written once more
    return before, after


def bytes_plain(anchor: Node) -> int:
    """Bytes that an unfused GEMM moves: its inputs (a bias too) and its product."""
    return bytes_of(anchor, *anchor.all_input_nodes)


def _partials(region: Region, config: str) -> int:
    (m, n, _), (tile_m, tile_n) = region.shape, tile(config)
    tiles = {"row": hint(m) * -(-n // tile_n), "col": -(-hint(m) // tile_m) * n}
    return _PARTIAL * sum(tiles[reduce.axis] for reduce in {*region.reduces.values()})
