# SPDX-License-Identifier: Apache-2.0
"""The blocks of suite `kernels`: memory-bound work of a Transformer layer with the GEMMs beside it.

Each is a plain module as a model would write it, and knows how Liger's kernels do the same (with
the module's own ``nn.Linear`` for the GEMMs). Inputs are (1, M, width).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from .gradients import REFERENCE_ROWS
from .layer import EPS, NORMS

if TYPE_CHECKING:
    from collections.abc import Callable

Widths = tuple[int, int, int]  # d, f and that of k, as ``layer.SIZES`` has them
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
    liger_overwrites = False

    def __init__(self, widths: Widths, norm: str, _rows: int):
        super().__init__()
        d, *_ = widths
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

    def __init__(self, widths: Widths, norm: str, rows: int):
        super().__init__(widths, norm, rows)
        d, *_ = widths
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
    liger_overwrites = False

    def __init__(self, widths: Widths, norm: str, _rows: int):
        super().__init__()
        d, f, _ = widths
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
    liger_overwrites = True  # its backward leaves the gradients in the saved tensors

    def __init__(self, widths: Widths, _norm: str, _rows: int):
        super().__init__()
        d, f, _ = widths
        self.down_proj = nn.Linear(f, d, bias=False)
        self.width = f

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.down_proj(F.silu(gate) * up),)

    def liger(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` through Liger's SwiGLU."""
        apply = liger_ops().LigerSiLUMulFunction.apply
        return lambda gate, up: (self.down_proj(apply(gate, up)),)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(-b, a) of the halves a and b of each row, as Hugging Face's Llama writes it."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Rotary(nn.Module):
    """``rotate(q_proj(x))`` and ``rotate(k_proj(x))``, (1, M, heads, head) each.

    Positions begin again as those of packed documents do, with each chunk of the rows that
    ``gradients.reference`` computes at a time.
    """

    inputs = ("x",)
    outputs = ("q", "k")
    liger_overwrites = True  # it rotates in place, the gradients that it is given too

    def __init__(self, widths: Widths, _norm: str, rows: int):
        super().__init__()
        d, _, kv = widths
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv, bias=False)
        self.width, self.head = d, min(kv, 64 if d <= 2048 else 128)
        frequencies = 500000.0 ** -(torch.arange(0, self.head, 2) / self.head)
        positions = torch.arange(rows) % REFERENCE_ROWS
        angles = torch.outer(positions, frequencies).repeat(1, 2)[None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries and keys before they are rotated, (1, heads, M, head) each."""
        made = (self.q_proj(x), self.k_proj(x))
        return [t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in made]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin = (table[:, None, : x.shape[1]] for table in (self.cos, self.sin))
        turned = [t * cos + rotate_half(t) * sin for t in self.heads(x)]
        return tuple(t.transpose(1, 2) for t in turned)

    def turned_by_liger(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries and keys rotated by Liger's kernel, as `forward` returns them."""
        turned = liger_ops().LigerRopeFunction.apply(q, k, self.cos, self.sin)
        return tuple(t.transpose(1, 2) for t in turned)

    def liger(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` through Liger's rotation."""
        return lambda x: self.turned_by_liger(*self.heads(x))


class NormRotary(Rotary):
    """The same of queries and keys whose heads are normalized first, as in Qwen3."""

    def __init__(self, widths: Widths, norm: str, rows: int):
        super().__init__(widths, norm, rows)
        self.q_norm = NORMS[norm](self.head, eps=EPS)
        self.k_norm = NORMS[norm](self.head, eps=EPS)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, k = super().heads(x)
        return [self.q_norm(q), self.k_norm(k)]

    def liger(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` through Liger's RMSNorm and rotation."""
        ops = liger_ops()

        def normed(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
            rows = x.transpose(1, 2)  # as they lie in memory
            found = ops.LigerRMSNormFunction.apply(rows, norm.weight, EPS, 0.0, CASTS, True)
            return found.transpose(1, 2)

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k = super(NormRotary, self).heads(x)
            return self.turned_by_liger(normed(q, self.q_norm), normed(k, self.k_norm))

        return forward


BLOCKS = {
    "residual_norm": ResidualNorm,
    "residual_norm_gemm": ResidualNormGemm,
    "norm_swiglu": NormSwiGLU,
    "swiglu_down": SwiGLUDown,
    "rotary": Rotary,
    "norm_rotary": NormRotary,
}
