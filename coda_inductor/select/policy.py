# SPDX-License-Identifier: Apache-2.0
"""May and should a GEMM be fused, and does it run as a kernel or through the reference?

The three answers are kept apart: *legal* (dtype, shape, device, kernel stack), *expected to win*
(the gate) and *how* (kernel, reference expanded into the graph, or unfused with the reason).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import inductor_config
from coda_inductor.fuse.region import Region
from coda_inductor.fuse.sums import in_place
from coda_inductor.graph.gemms import GEMMS, gemm_inputs
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sizes import hint, same
from coda_inductor.log import Failure
from coda_inductor.mainloop import availability
from coda_inductor.options import Options
from coda_inductor.program import EpilogueProgram, Store
from coda_inductor.program.dtypes import FLOATS, HALF, dtype_name
from coda_inductor.report import Estimate
from coda_inductor.select import gate, legality, model
from coda_inductor.select.config import Config, choose
from coda_inductor.select.device import arch_of

_STORE = Store("out0", "acc", "bfloat16")
#: Shapes the partials of a call that is then expanded; any legal config will do.
REFERENCE_CONFIG = Config(128, 128, 2, 1, True)


@dataclass(frozen=True)
class Verdict:
    """``how`` is "kernel", "reference" or "unfused"; ``reason`` says why it is not a kernel."""

    how: str
    reason: str = ""
    config: str = ""


@dataclass(frozen=True)
class Policy:
    """Decisions under one set of options, for one graph.

    ``small`` says why the graph's GEMMs are too small to fuse, or is None; ``idle`` why no GEMM of
    any size becomes a kernel on this GPU. ``dry``: only say what would happen, with expected times;
    compile nothing and warn of nothing.
    """

    options: Options
    small: str | None = None
    dry: bool = False
    idle: str | None = None
    on_gpu: bool = False

    @property
    def fuses(self) -> bool:
        """May anything be fused in this graph?"""
        return self.small is None and self.options.gate != "never"

    @property
    def compiles(self) -> bool:
        """May any GEMM in this graph become a kernel?"""
        return self.fuses and self.idle is None and self.on_gpu and not self.options.reference

    def rounds(self, a: torch.Tensor) -> bool:
        """Is the product of the left operand ``a`` rounded before the epilogue? Kernels never do
        that. A CPU's plain ops do: not to takes twice as long in 16 bits."""
        return a.device.type != "cuda" and not (self.options.reference or self.dry)

    @staticmethod
    def of(options: Options, graph: Graph) -> Policy:
        """The policy for ``graph``: its GEMMs together decide whether the host is the limit."""
        config = inductor_config.triton
        cuda_graphs = options.inductor.get("triton.cudagraphs", config.cudagraphs)
        pairs = [gemm_inputs(node) for node in graph.nodes if node.target in GEMMS]
        pairs = [(fake(a), fake(b)) for a, b in pairs if fake(a).is_cuda]
        if not pairs:
            return Policy(options)
        shapes = [(hint(a.shape[0]), hint(b.shape[1]), hint(b.shape[0])) for a, b in pairs]
        small = idle = None
        if not options.reference:
            idle = availability.kernel_stack(pairs[0][0].device)
        if options.gate == "auto":
            small = None if cuda_graphs else gate.host_bound(shapes)
            idle = idle or gate.unmeasured(arch_of(pairs[0][0].device))
        return Policy(options, small, idle=idle, on_gpu=True)

    def legal(self, gemm: Node) -> str | None:
        """Why the epilogue of ``gemm`` may not be fused, whatever it holds; None if it may.

        A reason that is a :class:`~coda_inductor.log.Failure` deserves a warning.
        """
        a, b = gemm_inputs(gemm)
        tensors = [fake(a), fake(b)]
        if any(not isinstance(t, torch.Tensor) for t in tensors):
            return "its operands are not tensors"
        x, w = tensors
        if x.dtype != w.dtype or x.dtype not in FLOATS:
            return Failure(f"{x.dtype} times {w.dtype} has no epilogue program")
        if any(isinstance(size, torch.SymInt) for size in (*x.shape[1:], *w.shape)):
            return "N or K is symbolic"
        if any(same(size, 0) for size in (*x.shape, *w.shape)):
            return "one of its sizes is 0"
        if self.options.gate == "never":
            return "options['gate'] is 'never'"
        if not self._kernels(x):
            return None
        bare = EpilogueProgram(("acc",), dtype_name(x.dtype), stores=(_STORE,))
        if (
            stack := availability.kernel_stack(x.device)
        ) is not None:  # runtime.notice says it once
            return Failure(stack) if self.options.strict else stack
        failure = (
            legality.unsupported(bare, w.shape[1], w.shape[0], device=x.device)
            or legality.unaligned("its left operand", x)
            or legality.unaligned("its right operand", w)
        )
        if failure is not None:
            return Failure(failure)
        return self.small or self.idle

    def norm_loses(self, gemms: list[Node], training: bool) -> str | None:
        """Why putting a LayerNorm off past ``gemms`` costs more than it saves, or None."""
        a, _ = gemm_inputs(gemms[0])
        if self.options.gate != "auto" or not self._kernels(fake(a)):
            return None
        m, k = fake(a).shape
        n = sum(fake(gemm_inputs(gemm)[1]).shape[1] for gemm in gemms)
        return gate.norm_loses(hint(m), n, k, fake(a).element_size(), training=training)

    def split_loses(self, gemm: Node, training: bool) -> str | None:
        """Why reading a packed projection's halves apart costs more than it saves, or None. In
        training its weight's gradient, (2F, K), is then put together by a copy; what is saved is
        reading the product (M, 2F) at least once."""
        a, _ = gemm_inputs(gemm)
        if self.options.gate != "auto" or not self._kernels(fake(a)) or not training:
            return None
        m, k = fake(a).shape
        if hint(m) >= 2 * k:
            return None
        return f"putting its weight's gradient together costs more than it saves below {2 * k} rows"

    def _kernels(self, a: torch.Tensor) -> bool:
        """Kernels are for CUDA; everything else runs the reference, compiled by Inductor."""
        return a.device.type == "cuda" and not self.options.reference

    def judge(self, region: Region, program: EpilogueProgram, behind: frozenset[str]) -> Verdict:
        """How a region runs; ``behind`` as in :class:`~coda_inductor.select.gate.Work`."""
        a, _ = gemm_inputs(region.anchors[0])
        if not self._kernels(fake(a)):
            why = f"device {fake(a).device.type} has no kernels"
            if self.options.reference:
                why = "options['reference'] is set"
            return Verdict("reference", why, str(REFERENCE_CONFIG))
        m, n, k = region.shape
        terms, joined = _terms(region)
        device = fake(a).device
        major = b_major(fake(gemm_inputs(region.anchors[0])[1]))
        reason = legality.unsupported(program, n, k, b_major=major, device=device)
        if reason is not None:
            return Verdict("unfused", Failure(reason))
        if self.options.gate == "auto":
            work = gate.Work(program, hint(m), n, k, terms, behind, joined)
            reason = gate.loses(work)
            if reason is not None:
                return Verdict("unfused", reason)
        return Verdict("kernel", config=str(choose(program, m, n, k, device, terms)))

    def estimate(
        self, region: Region, program: EpilogueProgram, behind: frozenset[str]
    ) -> Estimate:
        """What :meth:`judge` would say of a region on an H100, whatever device this is. The gate
        counts only where the options ask for it."""
        m, n, k = region.shape
        terms, joined = _terms(region)
        work = gate.Work(program, hint(m), n, k, terms, behind, joined)
        unfused = len(program.accs) * sum(model.cublas_us(m, n, each) for each in work.ks)
        major = b_major(fake(gemm_inputs(region.anchors[0])[1]))
        reason = legality.unsupported(program, n, k, b_major=major)
        if reason is not None:
            return Estimate(unfused, refusal=reason)
        config = choose(program, m, n, k, terms=terms)
        fused, unfused = gate.expected(work)
        loses = gate.loses(work) if self.options.gate == "auto" else None
        known = model.measured(program, config, m, n, k, terms)
        return Estimate(unfused, fused, known, str(config), loses or "")

    def estimate_plain(self, gemm: Node) -> Estimate | None:
        """Expected time of a GEMM alone, in cuBLAS; None for what the model does not know."""
        a, b = (fake(x) for x in gemm_inputs(gemm))
        symbolic = any(isinstance(s, torch.SymInt) for s in (*a.shape[1:], *b.shape))
        if symbolic or a.dtype not in HALF:
            return None
        return Estimate(model.cublas_us(a.shape[0], b.shape[1], b.shape[0]))


def _terms(region: Region) -> tuple[int, tuple[int, ...]]:
    """How many products one kernel reads in place; else the K of each, whose weights are copied
    together."""
    if region.total is None:
        return 1, ()
    if in_place(region.anchors):
        return len(region.anchors), ()
    return 1, tuple(fake(gemm_inputs(anchor)[0]).shape[1] for anchor in region.anchors)


def b_major(b: torch.Tensor) -> str:
    """Which dimension of B (K, N) is contiguous: "n", or "k" for a linear layer's weight."""
    return "n" if b.stride(1) == 1 and b.stride(0) != 1 else "k"
