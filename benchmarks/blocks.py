# SPDX-License-Identifier: Apache-2.0
"""The blocks of suite `kernels`: memory-bound work of a Transformer layer with the GEMMs beside it.

Each is a plain module as a model would write it, and knows how Liger's kernels do the same (with
the module's own ``nn.Linear`` for the GEMMs). All tensors are (1, M, width).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import nn

from .layer import EPS, NORMS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

CASTS = "llama"  # Liger's name for rounding where HF's Llama rounds


def liger_ops() -> Any:
    """The module ``liger_kernel.ops``; raises ImportError with the remedy where it is absent."""
    try:
        from liger_kernel import ops
    except ImportError as error:
        raise ImportError(f"Liger's kernels need `pip install liger-kernel` ({error})") from error
    return ops


class ResidualNorm(nn.Module):
    """``x = residual + o_proj(y)`` and ``norm(x)``, both returned."""

    inputs = ("residual", "y")
    outputs = ("x", "normed")
    liger_overwrites_inputs = False

    def __init__(self, d: int, _f: int, norm: str):
        super().__init__()
        self.o_proj = nn.Linear(d, d, bias=False)
        self.norm = NORMS[norm](d, eps=EPS)
        self.width = d

    def forward(self, residual: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = residual + self.o_proj(y)
        return x, self.norm(x)

    def liger(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` through Liger's fused addition and RMSNorm."""
        apply, weight = liger_ops().LigerFusedAddRMSNormFunction.apply, self.norm.weight

        def forward(residual: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # Not in place: the gradient of `normed` is the caller's tensor here.
            normed, x = apply(self.o_proj(y), residual, weight, EPS, 0.0, CASTS, False)
            return x, normed

        return forward


class ResidualNormGemm(ResidualNorm):
    """``x = residual + o_proj(y)`` and ``q_proj(norm(x))``, both returned."""

    outputs = ("x", "q")

    def __init__(self, d: int, _f: int, norm: str):
        super().__init__(d, _f, norm)
        self.q_proj = nn.Linear(d, d, bias=False)

    def forward(self, residual: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, normed = super().forward(residual, y)
        return x, self.q_proj(normed)

    def liger(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` through Liger's fused addition and RMSNorm."""
        add_norm = super().liger()

        def forward(residual: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, normed = add_norm(residual, y)
            return x, self.q_proj(normed)

        return forward


class NormSwiGLU(nn.Module):
    """``silu(gate(norm(x))) * up(norm(x))``."""

    inputs = ("x",)
    outputs = ("hidden",)
    liger_overwrites_inputs = False

    def __init__(self, d: int, f: int, norm: str):
        super().__init__()
        self.norm = NORMS[norm](d, eps=EPS)
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.width = d

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norm(x)
        return (F.silu(self.gate_proj(h)) * self.up_proj(h),)

    def liger(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` through Liger's RMSNorm and SwiGLU, with their defaults (in place)."""
        ops, weight = liger_ops(), self.norm.weight

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = ops.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, CASTS, True)
            return (ops.LigerSiLUMulFunction.apply(self.gate_proj(h), self.up_proj(h)),)

        return forward


class SwiGLUDown(nn.Module):
    """``down_proj(silu(gate) * up)``; gate and up come from elsewhere."""

    inputs = ("gate", "up")
    outputs = ("out",)
    liger_overwrites_inputs = True  # its backward leaves the gradients in the saved tensors

    def __init__(self, d: int, f: int, _norm: str):
        super().__init__()
        self.down_proj = nn.Linear(f, d, bias=False)
        self.width = f

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.down_proj(F.silu(gate) * up),)

    def liger(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` through Liger's SwiGLU."""
        apply = liger_ops().LigerSiLUMulFunction.apply
        return lambda gate, up: (self.down_proj(apply(gate, up)),)


BLOCKS = {
    "residual_norm": ResidualNorm,
    "residual_norm_gemm": ResidualNormGemm,
    "norm_swiglu": NormSwiGLU,
    "swiglu_down": SwiGLUDown,
}
