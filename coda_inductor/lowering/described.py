# SPDX-License-Identifier: Apache-2.0
"""What the report of a GEMM says: its name, the ops it absorbed, where it ended, its bytes."""

from torch.fx import Node

from coda_inductor.fuse.region import Region
from coda_inductor.graph.collectives import ahead
from coda_inductor.graph.gemms import WEIGHT_GRADIENT, gemm_inputs
from coda_inductor.graph.nodes import bytes_of, fake, is_cast, is_transpose, label, locate
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import consumer
from coda_inductor.kernels import tile
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.report import SiteReport


def unfused(gemm: Node, scope: Scope) -> SiteReport:
    """The report of a GEMM that is not fused, without a reason."""
    shape = (*fake(gemm).shape, fake(gemm_inputs(gemm)[0]).shape[-1])
    traffic = bytes_of(gemm, *gemm.all_input_nodes)
    gradient = "weight gradient" if is_wgrad(gemm) else "input gradient"
    role = "forward" if gemm in scope.forward else gradient
    return SiteReport(locate(gemm), shape, role=role, bytes_before=traffic, bytes_after=traffic)


def is_wgrad(anchor: Node) -> bool:
    """Is ``anchor`` the gradient of a weight? Its K is the number of rows."""
    return is_transpose(gemm_inputs(anchor)[0]) or bool(anchor.meta.get(WEIGHT_GRADIENT))


def name_of(anchors: tuple[Node, ...]) -> str:
    """``mlp.gate_proj``, or ``mlp.gate_proj + up_proj`` for a pair; node names without modules."""
    first, *others = (locate(anchor) for anchor in anchors)
    return " + ".join([first, *(other.rpartition(".")[2] for other in others)])


def op_names(region: Region) -> tuple[str, ...]:
    """The short names of the ops that an epilogue computes, for reports."""
    names = tuple(short(node) for node in region.work if not is_cast(node))
    return names or (("cast",) if region.work else ("product",))


def short(node: Node) -> str:
    """The name of ``node`` in the table: ``mul`` for ``aten.mul.Tensor``."""
    return str(node.target).removeprefix("aten.").removeprefix("coda_inductor.").split(".")[0]


def idle_reason(region: Region) -> Refusal:
    """The reason why nothing was absorbed: the first neighbor's."""
    for node, why in region.refusals.items():
        text = f"nothing to absorb: {label(consumer(node))} reads it ({{}})"
        return stop(node, why).within(text)
    return refuse("no-neighbours", "its result is not used")


def stop(node: Node, why: Refusal) -> Refusal:
    """The reason why ``node`` was not absorbed: a collective, if it leads to one; else ``why``."""
    if (collective := ahead(node)) is None:
        return why
    name = collective.target.overloadpacket.__name__
    text = f"{name}, a collective, is between this GEMM and what follows"
    return refuse("collective", text)


def bytes_moved(region: Region, config: str) -> tuple[int, int]:
    """(before, after): bytes that a fused region with ``config`` moves to and from memory.

    They are calculated, not measured: each kernel reads each of its tensors once and writes each
    result once, as if no data stayed in a cache or was loaded twice. Before: each GEMM, and one
    elementwise kernel that does all work that the epilogue absorbed. After: the fused kernel, with
    partials of reductions (float32) and copies of weights that must be concatenated."""
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
    tile_m, tile_n = tile(config)
    tiles = {"row": hint(m) * -(-n // tile_n), "col": -(-hint(m) // tile_m) * n}
    partials = 4 * sum(tiles[reduce.axis] for reduce in {*region.reduces.values()})
    after = shared + right + operands + stores + partials
    if region.total is not None and not region.in_place:
        after += 2 * right  # the weights are read and written once more
    return before, after
