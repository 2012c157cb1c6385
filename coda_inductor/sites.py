# SPDX-License-Identifier: Apache-2.0
"""The sites of one graph: what is known of each GEMM, found out once.

A GEMM's site begins with a program that only stores its product. Whether kernels can read that GEMM
at all (dtypes, layout, alignment, generation) is its refusal, which every pass reads. The fuser
refines the same site with the program of the region that it grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.fuse.grow import grow, on_tile
from coda_inductor.fuse.region import Region
from coda_inductor.graph.gemms import gemm_inputs, routes_of
from coda_inductor.graph.nodes import fake, renames, row_major
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import hint, same
from coda_inductor.graph.walk import base
from coda_inductor.kernels import QUACK, Site
from coda_inductor.plan import Plan, several_ranks
from coda_inductor.program import EpilogueProgram, Operand, Store
from coda_inductor.program.dtypes import FLOATS, FP8, dtype_name
from coda_inductor.program.ir import ROUTES
from coda_inductor.refusal import Refusal, refuse

_STORE = Store("out0", "acc", "bfloat16")


@dataclass(frozen=True)
class Known:
    """What is known of a GEMM: the reason why its epilogue may not be fused, whatever it holds, or
    None; and its site, None where dtypes or sizes allow none."""

    refusal: Refusal | None
    site: Site | None = None


class Sites:
    """The sites of the GEMMs of one graph, under one plan."""

    def __init__(self, plan: Plan):
        self.plan = plan
        #: Each GEMM with its operands at that time: a pass may change them.
        self._table: dict[Node, tuple[tuple[Any, ...], Known]] = {}

    def __getitem__(self, gemm: Node) -> Site:
        """The site of a GEMM that has no refusal."""
        site = self._known(gemm).site
        assert site is not None, f"{gemm} is a GEMM of floats with known N and K"
        return site

    def refusal(self, gemm: Node) -> Refusal | None:
        """The reason why the epilogue of ``gemm`` may not be fused, whatever it holds, or None."""
        return self._known(gemm).refusal

    def refined(self, region: Region, **more: Any) -> Site:
        """The first GEMM's site with the program and sizes of ``region``, and ``more`` fields."""
        m, n, k = region.shape
        own = self[region.anchors[0]]
        return replace(own, program=region.program, m=hint(m), n=n, k=k, **more)

    def fits(self, site: Site) -> bool:
        """Is there a kernel with enough shared memory for ``site``? True if no kernels run."""
        kernels = QUACK if self.plan.dry else self.plan.kernels(site.device)
        why = kernels.refuses(site)
        return why is None or why.code != "shared-memory"

    def absorbs(self, gemm: Node, x: Node, scope: Scope, *, wins: bool = False) -> bool:
        """Can the epilogue of ``gemm`` compute ``x``, whose rows are the tile's? ``wins``: only in
        a kernel that is expected, or was measured, to win."""
        if not same(fake(x).shape[-1], fake(gemm).shape[-1]):
            return False
        if not wins or not self.plan.on_kernels(fake(gemm).device):
            return base(x, renames) is gemm or (row_major(fake(x)) and on_tile(x, gemm, scope))
        region = grow((gemm,), scope)
        return x in region.values and self.plan.judge(self.refined(region)).how != "unfused"

    def for_products(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, training: bool
    ) -> "Sites":
        """No sites yet, under the plan of ``pairs``, see :meth:`Plan.for_products`."""
        return Sites(self.plan.for_products(pairs, training=training))

    def known(self, x: Any, w: Any, routes: Sequence[str] = ()) -> Known:
        """What is known of a GEMM of ``x`` (M, K), ``w`` (K, N), or (E, K, N) with ``routes``."""
        names = dtype_name(x.dtype), dtype_name(w.dtype)
        if (names[0] != names[1] or x.dtype not in FLOATS) and not {*names} <= {*FP8}:
            text = f"{x.dtype} times {w.dtype} has no epilogue program"
            return Known(refuse("gemm-dtypes", text, failure=True))
        if any(isinstance(size, torch.SymInt) for size in (*x.shape[1:], *w.shape)):
            return Known(refuse("symbolic-features", "N or K is symbolic"))
        operands = tuple(Operand(kind, kind, "int32") for kind in routes)
        bare = EpilogueProgram(("acc",), names[0], operands, stores=(_STORE,), b_dtype=names[1])
        site = Site.of(
            bare, x, w, (x.shape[0], w.shape[-1], w.shape[-2]), crowded=several_ranks(),
            device=self.plan.device or x.device, arch=self.plan.gpu.arch,
        )  # fmt: skip
        if any(same(size, 0) for size in (*x.shape, *w.shape)):
            return Known(refuse("no-gain", "one of its sizes is 0"), site)
        why = self.plan.refusal(x.device) or self.plan.kernels(x.device).refuses(site, x, w)
        return Known(why, site)

    def _known(self, gemm: Node) -> Known:
        a, b = gemm_inputs(gemm)
        operands = (a, b, fake(a), fake(b))
        seen, known = self._table.get(gemm, ((), None))
        if known is None or any(x is not y for x, y in zip(seen, operands, strict=True)):
            routes = [k for k, n in zip(ROUTES, routes_of(gemm), strict=True) if n is not None]
            known = self.known(fake(a), fake(b), routes)
            self._table[gemm] = operands, known
        return known
