# SPDX-License-Identifier: Apache-2.0
"""Decisions about the GEMMs of one graph, under one set of options.

A GEMM is asked about twice: *may* its epilogue hold anything (``legal``: dtype, shape, device,
kernel libraries), before anything is planned; and *how* does the planned site run (``judge``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import inductor_config
from coda_inductor.graph.gemms import GEMMS, gemm_inputs
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sizes import hint, same
from coda_inductor.mainloop import availability
from coda_inductor.options import Options
from coda_inductor.program import EpilogueProgram, Store
from coda_inductor.program.dtypes import FLOATS, HALF, dtype_name
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.report import Estimate
from coda_inductor.select import gate, legality
from coda_inductor.select.choice import Choice, select
from coda_inductor.select.config import Config
from coda_inductor.select.device import arch_of
from coda_inductor.select.model import cublas_us, ground
from coda_inductor.select.site import Site

_STORE = Store("out0", "acc", "bfloat16")
#: Shapes the partials of a call that is then expanded; any legal config will do.
REFERENCE_CONFIG = str(Config(128, 128, 2, 1, True))


@dataclass(frozen=True)
class Policy:
    """See the module docstring.

    Attributes:
        options: the user's.
        too_small: why the graph's GEMMs are too small to fuse.
        no_kernels: why no GEMM of any size becomes a kernel on this GPU.
        on_gpu: are there GEMMs on a GPU?
        dry: only say what would happen, with expected times and the kernels' numerics.
    """

    options: Options
    too_small: Refusal | None = None
    no_kernels: Refusal | None = None
    on_gpu: bool = False
    dry: bool = False

    @staticmethod
    def of(options: Options, graph: Graph, *, dry: bool = False) -> Policy:
        """The policy for ``graph``: its GEMMs together decide whether the host is the limit."""
        config = inductor_config.triton
        cuda_graphs = options.inductor.get("triton.cudagraphs", config.cudagraphs)
        pairs = [gemm_inputs(node) for node in graph.nodes if node.target in GEMMS]
        pairs = [(fake(a), fake(b)) for a, b in pairs if fake(a).is_cuda]
        if not pairs:
            return Policy(options, dry=dry)
        shapes = [(hint(a.shape[0]), hint(b.shape[1]), hint(b.shape[0])) for a, b in pairs]
        device = pairs[0][0].device
        too_small = no_kernels = None
        if not options.reference:
            no_kernels = availability.kernel_stack(device)
        if options.gate == "auto":
            too_small = None if cuda_graphs else gate.host_bound(shapes)
            no_kernels = no_kernels or gate.unmeasured(arch_of(device))
        return Policy(options, too_small, no_kernels, on_gpu=True, dry=dry)

    @property
    def fuses(self) -> bool:
        """May anything be fused in this graph?"""
        return self.too_small is None and self.options.gate != "never"

    @property
    def compiles(self) -> bool:
        """May any GEMM in this graph become a kernel?"""
        possible = self.no_kernels is None and not self.options.reference
        return self.fuses and self.on_gpu and possible

    def rounds(self, a: torch.Tensor) -> bool:
        """Is the product of the left operand ``a`` rounded before the epilogue? Kernels never do
        that. A CPU's plain ops do: not to takes twice as long in 16 bits."""
        return a.device.type != "cuda" and not (self.options.reference or self.dry)

    def legal(self, gemm: Node) -> Refusal | None:
        """Why the epilogue of ``gemm`` may not be fused, whatever it holds; None if it may."""
        x, w = (fake(n) for n in gemm_inputs(gemm))
        if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor):
            return refuse("not-matrices", "its operands are not tensors")
        if x.dtype != w.dtype or x.dtype not in FLOATS:
            text = f"{x.dtype} times {w.dtype} has no epilogue program"
            return refuse("gemm-dtypes", text, failure=True)
        if any(isinstance(size, torch.SymInt) for size in (*x.shape[1:], *w.shape)):
            return refuse("symbolic-features", "N or K is symbolic")
        if any(same(size, 0) for size in (*x.shape, *w.shape)):
            return refuse("empty", "one of its sizes is 0")
        if self.options.gate == "never":
            return refuse("gate-never", "options['gate'] is 'never'")
        if not self._kernels(x):
            return None
        if (why := availability.kernel_stack(x.device)) is not None:  # runtime.notice says it once
            return why.failing() if self.options.strict else why
        bare = EpilogueProgram(("acc",), dtype_name(x.dtype), stores=(_STORE,))
        return (
            legality.unsupported(bare, w.shape[1], w.shape[0], device=x.device)
            or legality.unaligned("its left operand", x)
            or legality.unaligned("its right operand", w)
            or self.too_small
            or self.no_kernels
        )

    def norm_loses(self, gemms: list[Node], training: bool) -> Refusal | None:
        """Why deferring a LayerNorm past ``gemms`` costs more than it saves, or None."""
        a, _ = gemm_inputs(gemms[0])
        if self.options.gate != "auto" or not self._kernels(fake(a)):
            return None
        m, k = fake(a).shape
        n = sum(fake(gemm_inputs(gemm)[1]).shape[1] for gemm in gemms)
        return gate.norm_loses(hint(m), n, k, fake(a).element_size(), training=training)

    def split_loses(self, gemm: Node, training: bool) -> Refusal | None:
        """Why reading a packed projection's halves apart costs more than it saves, or None. In
        training its weight's gradient, (2F, K), is then put together by a copy; what is saved is
        reading the product (M, 2F) at least once."""
        a, _ = gemm_inputs(gemm)
        if self.options.gate != "auto" or not self._kernels(fake(a)) or not training:
            return None
        m, k = fake(a).shape
        if hint(m) >= 2 * k:
            return None
        text = f"putting its weight's gradient together costs more than it saves below {2 * k} rows"
        return refuse("split-copies-gradient", text)

    def judge(self, site: Site, a: torch.Tensor) -> Choice:
        """How a planned site runs whose left operand is ``a``."""
        if self.options.reference:
            why = refuse("reference-asked", "options['reference'] is set")
        elif not self._kernels(a):
            why = refuse("no-kernels-on-device", f"device {a.device.type} has no kernels")
        else:
            return select(site, gated=self.options.gate == "auto")
        return Choice("reference", REFERENCE_CONFIG, why)

    def estimate(self, site: Site) -> Estimate:
        """What would be chosen on an H100, whatever device this is."""
        found = select(site, gated=self.options.gate == "auto")
        return Estimate(found.unfused_us, found.fused_us, found.ground, found.config, found.refusal)

    def estimate_plain(self, gemm: Node) -> Estimate | None:
        """Expected time of a GEMM alone, in cuBLAS; None for what the model does not know."""
        a, b = (fake(x) for x in gemm_inputs(gemm))
        symbolic = any(isinstance(s, torch.SymInt) for s in (*a.shape[1:], *b.shape))
        if symbolic or a.dtype not in HALF:
            return None
        (m, k), n = a.shape, b.shape[1]
        return Estimate(cublas_us(m, n, k), ground=ground(None, None, m, n, k))

    def _kernels(self, a: torch.Tensor) -> bool:
        """Kernels are for CUDA; everything else runs the reference, compiled by Inductor."""
        return a.device.type == "cuda" and not self.options.reference
