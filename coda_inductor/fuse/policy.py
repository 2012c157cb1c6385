"""May and should a GEMM be fused, and does it run as a kernel or through the reference?

The three answers are kept apart: *legal* (dtype, shape, device, kernel stack), *expected to win*
(the gate) and *how* (kernel, reference expanded into the graph, or unfused with the reason).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.fuse.region import Region, gemm_inputs
from coda_inductor.graph import FLOATS, fake
from coda_inductor.options import Options
from coda_inductor.program import EpilogueProgram
from coda_inductor.runtime import gate, support
from coda_inductor.runtime.config import choose


@dataclass(frozen=True)
class Verdict:
    """``how`` is "kernel", "reference" or "unfused"; ``reason`` says why it is not a kernel."""

    how: str
    reason: str = ""
    config: str = ""


@dataclass(frozen=True)
class Policy:
    """Decisions under one set of options."""

    options: Options

    def legal(self, gemm: Node) -> str | None:
        """Why the epilogue of ``gemm`` may not be fused, whatever it holds; None if it may."""
        a, b = gemm_inputs(gemm)
        tensors = [fake(a), fake(b)]
        if any(not isinstance(t, torch.Tensor) for t in tensors):
            return "its operands are not tensors"
        x, w = tensors
        if x.dtype != w.dtype or x.dtype not in FLOATS:
            return f"dtypes {x.dtype} and {w.dtype}"
        if any(isinstance(size, torch.SymInt) for size in (*x.shape[1:], *w.shape)):
            return "N or K is symbolic"
        if self.options.gate == "never":
            return "options['gate'] is 'never'"
        if not self._kernels(x):
            return None
        return (
            support.kernel_stack()
            or support.unsupported_gemm(x.dtype, w.shape[1], w.shape[0])
            or (gate.too_small(_hint(x.shape[0]), w.shape[1], w.shape[0]) if self._gated else None)
        )

    @property
    def _gated(self) -> bool:
        return self.options.gate == "auto"

    def _kernels(self, a: torch.Tensor) -> bool:
        """Kernels are for CUDA; everything else runs the reference, compiled by Inductor."""
        return a.device.type == "cuda" and not self.options.reference

    def judge(self, region: Region, program: EpilogueProgram) -> Verdict:
        """How a region runs."""
        a, _ = gemm_inputs(region.anchors[0])
        if not self._kernels(fake(a)):
            return Verdict("reference", f"device {fake(a).device.type} has no kernels")
        m, n, k = region.shape
        if (reason := support.unsupported(program, n, k)) is not None:
            return Verdict("unfused", reason)
        if self._gated and (reason := gate.loses(program, _hint(m), n, k)) is not None:
            return Verdict("unfused", reason)
        return Verdict("kernel", config=str(choose(program, _hint(m), n, k)))


def _hint(m: Any) -> int:
    """The value of M that a symbolic M was traced with."""
    if isinstance(m, torch.SymInt):
        hint = m.node.hint
        return int(hint) if hint is not None else 4096
    return int(m)
