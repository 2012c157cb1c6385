# SPDX-License-Identifier: Apache-2.0
"""The plan: decisions about the GEMMs of one graph together, under one set of options: may any be
fused on its device, for which GPU, by which measurements; and how does a planned site run?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import inductor_config
from coda_inductor.gpu import H100, Gpu, gpu_of
from coda_inductor.graph.gemms import TRACED, gemm_inputs
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sides import training
from coda_inductor.graph.sizes import hint
from coda_inductor.kernels import (
    QUACK,
    Kernels,
    Measurements,
    Reference,
    Site,
    host_bound,
    measurements_of,
    product_us,
    unmeasured,
)
from coda_inductor.options import Options
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import HALF, dtype_name
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.report import UNFUSED, Choice


def as_16_bits(b: torch.Tensor) -> int:
    """K of a 16-bit GEMM that takes about as long as a GEMM with ``b``, (..., K, N)."""
    k = hint(b.shape[-2])
    return k // 2 if b.element_size() == 1 else k


def several_ranks() -> bool:
    """Is this process one of several ranks, so that collectives may run beside kernels?"""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


@dataclass(frozen=True)
class Plan:
    """The plan of a graph, see the module docstring.

    Attributes:
        options: the user's options.
        dry: only report decisions, with expected times and the kernels' numerics.
        device: decide as if all tensors were on this CUDA device ("meta": a GPU that is absent).
        gpu_model: decide for this GPU model; None for the model of ``device`` or of the tensors.
        too_small: the reason if the graph's GEMMs are too small to fuse, or None.
        no_kernels: the reason why no GEMM becomes a kernel on this GPU, or None.
        on_gpu: are there GEMMs on a GPU?
        store: the measurements on the graph's GPU model; None without a GPU.
        measures: are sites without a measurement measured before their choice counts?
    """

    options: Options
    dry: bool = False
    device: torch.device | None = None
    gpu_model: Gpu | None = None
    too_small: Refusal | None = None
    no_kernels: Refusal | None = None
    on_gpu: bool = False
    store: Measurements | None = None
    measures: bool = False

    def for_graph(self, graph: Graph) -> "Plan":
        """A copy of this plan, decided for ``graph``."""
        gemms = [node for node in graph.nodes if node.target in TRACED]
        pairs = [(fake(node), fake(gemm_inputs(node)[1])) for node in gemms]
        return self.for_products(pairs, training=training(graph))

    def for_products(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, training: bool
    ) -> "Plan":
        """A copy of this plan, decided for a graph with these GEMMs: ``pairs`` has a tensor with M
        rows and B (..., K, N) of each. Their total time, compared with that of the launches, tells
        whether the host is the limit. A dry run measures only on a given device."""
        options, cuda, triton = self.options, self.device, inductor_config.triton
        cuda_graphs = options.inductor.get("triton.cudagraphs", triton.cudagraphs)
        pairs = [(a, b) for a, b in pairs if cuda is not None or a.is_cuda]
        if not pairs:
            return self
        shapes = [(hint(a.shape[0]), hint(b.shape[-1]), as_16_bits(b)) for a, b in pairs]
        device = cuda or pairs[0][0].device
        gpu = self.gpu_model or gpu_of(device)
        store = measurements_of(gpu)
        too_small = no_kernels = None
        if not options.reference:
            no_kernels = QUACK.missing(device)
        if options.gate == "auto":
            too_small = None if cuda_graphs else host_bound(shapes, gpu, training=training)
        measures = options.measures and (cuda is not None or not self.dry)
        measures = measures and (no_kernels or too_small) is None
        if options.gate == "auto" and not measures and store.empty:
            no_kernels = no_kernels or unmeasured(gpu)
        return replace(self, too_small=too_small, no_kernels=no_kernels, on_gpu=True,
                       store=store, measures=measures)  # fmt: skip

    @property
    def gpu(self) -> Gpu:
        """The GPU that the decisions are for."""
        return H100 if self.store is None else self.store.gpu

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
        """Is the product of the left operand ``a`` rounded before the epilogue? Never in kernels,
        but in plain ops on a CPU, where a 16-bit product without rounding takes twice as long."""
        return a.device.type != "cuda" and not (self.options.reference or self.dry)

    def refusal(self, device: torch.device) -> Refusal | None:
        """The reason why no GEMM of the graph on ``device`` may be fused, or None."""
        if self.options.gate == "never":
            return refuse("gate-never", "options['gate'] is 'never'")
        if not self.on_kernels(device):
            return None
        if (why := QUACK.missing(self.device or device)) is not None:
            # With ``strict`` the user asks for something impossible; else ``notice`` warns once.
            return replace(why, failure=True) if self.options.strict else why
        # First: only where something is fused are operands laid out for kernels (by FP8's casts).
        return self.too_small or self.no_kernels

    def scales_vectors(self, device: torch.device) -> bool:
        """Do kernels run on ``device``, and does cuBLAS scale rows and columns of FP8 products?"""
        return self.compiles and QUACK.scales_vectors(self.device or device)

    def split_loses(self, a: torch.Tensor, training: bool) -> Refusal | None:
        """The reason if splitting a packed projection of ``a`` (M, K) costs more than it saves, or
        None. Training joins its weight's gradient, (2F, K), by a copy, and saves a read (M, 2F)."""
        if self.options.gate != "auto" or not self.on_kernels(a.device) or not training:
            return None
        m, k = a.shape
        if hint(m) >= 2 * k:
            return None
        text = f"joining its weight's gradient costs more than it saves below {2 * k} rows"
        return refuse("split-copies-gradient", text)

    def parts_lose(self, gemm: Node, widths: Sequence[int]) -> Refusal | None:
        """The reason if products of so many columns take over 5 % longer than ``gemm``, or None."""
        x, n = fake(gemm_inputs(gemm)[0]), fake(gemm).shape[1]
        us = [product_us(x.shape[0], width, x.shape[1], self.gpu) for width in (n, *widths)]
        free = self.options.gate != "auto" or not self.on_kernels(x.device)
        if free or sum(us[1:]) <= 1.05 * us[0]:
            return None
        return refuse("no-gain", "its columns in parts are expected to take longer")

    def judge(self, site: Site) -> Choice:
        """Choose how a planned site runs."""
        gated = self.options.gate == "auto"
        return self.kernels(site.device).choose(site, gated=gated, store=self.store)

    def estimate_plain(self, gemm: Node) -> Choice:
        """The choice for a GEMM alone, in cuBLAS, with its expected time if a kernel could run."""
        a, b = (fake(x) for x in gemm_inputs(gemm))
        symbolic = any(isinstance(s, torch.SymInt) for s in (*a.shape[1:], *b.shape))
        bare = EpilogueProgram(("acc",), dtype_name(a.dtype))
        if symbolic or not (a.dtype in HALF or bare.fp8):
            return UNFUSED
        (m, n), k = fake(gemm).shape, a.shape[1]
        ground = "roofline" if self.gpu.rated else "unknown"
        us = product_us(m, n, k, self.gpu, fp8=bare.fp8)
        return Choice("unfused", unfused_us=us, ground=ground)

    def kernels(self, device: torch.device) -> Kernels:
        """What computes the programs of tensors on ``device``."""
        if self.on_kernels(device):
            return QUACK
        if self.options.reference:
            return Reference(refuse("reference-asked", "options['reference'] is set"))
        return Reference(refuse("no-kernels-on-device", f"device {device.type} has no kernels"))

    def on_kernels(self, device: torch.device) -> bool:
        """Do kernels run on ``device``? Elsewhere than on CUDA, the reference is compiled."""
        on_gpu = self.device is not None or device.type == "cuda"
        return on_gpu and not self.options.reference
