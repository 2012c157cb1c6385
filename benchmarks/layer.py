# SPDX-License-Identifier: Apache-2.0
"""Suite `layer`: the non-attention part of a Llama layer as users write it, bf16, no gradients.

    x1 = x0 + o_proj(y)
    x2 = x1 + down(silu(gate(norm1(x1))) * up(norm1(x1)))
    q, k, v = q_proj(norm2(x2)), k_proj(norm2(x2)), v_proj(norm2(x2))

Separate q/k/v and gate/up ``nn.Linear``. Every compiled variant gets its own copy of the module,
same weights.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from . import ceiling
from .gradients import REFERENCE_ROWS, products
from .measure import Call, Variants, device, register, relative_error

if TYPE_CHECKING:
    from .runner import Job

# name: (d, f, kv) = model width, MLP width, width of k and of v
SIZES = {
    "tiny": (64, 128, 32),
    "1B": (2048, 8192, 512),
    "3B": (3072, 8192, 1024),
    "8B": (4096, 14336, 1024),
    "13B": (5120, 13824, 5120),
    "32B": (5120, 27648, 1024),
    "70B": (8192, 28672, 1024),
}
OUTPUTS = ("x2", "q", "k", "v")
EPS = 1e-5


class HFRMSNorm(nn.Module):
    """RMSNorm as `transformers` spells it for Llama: fp32 inside, weight applied after the cast
    back.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


def widths(size: str) -> tuple[int, int, int]:
    """(d, f, kv) of a key of SIZES, or of a text "d/f/kv" such as "2048/8192/512"; KeyError
    otherwise.
    """
    numbers = size.split("/")
    if len(numbers) == 3 and all(number.isdecimal() for number in numbers):
        d, f, kv = map(int, numbers)
        return d, f, kv
    return SIZES[size]


NORMS = {"hf": HFRMSNorm, "torch": nn.RMSNorm}


class Block(nn.Module):
    """The layer without its attention: ``(x0, y) -> (x2, q, k, v)``; x0, y, x2, q are (1, M, d), k,
    v (1, M, kv).
    """

    def __init__(self, d: int, f: int, kv: int, norm: str):
        super().__init__()
        self.o_proj = nn.Linear(d, d, bias=False)
        self.norm1 = NORMS[norm](d, eps=EPS)
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)
        self.norm2 = NORMS[norm](d, eps=EPS)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv, bias=False)
        self.v_proj = nn.Linear(d, kv, bias=False)

    def forward(self, x0: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x1 = x0 + self.o_proj(y)
        h = self.norm1(x1)
        x2 = x1 + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        n2 = self.norm2(x2)
        return x2, self.q_proj(n2), self.k_proj(n2), self.v_proj(n2)


@torch.no_grad()
def build(
    size: str, rows: int, norm: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Block, torch.Tensor, torch.Tensor]:
    """A block of unit-gain random weights and its inputs x0, y of shape (1, rows, d), all of
    `dtype`, on the device. `size` as :func:`widths` takes it.
    """
    torch.manual_seed(0)
    d, f, kv = widths(size)
    with torch.device(device()):
        block = Block(d, f, kv, norm)
        for name, weight in block.named_parameters():
            if name.startswith("norm"):
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
            else:
                weight.normal_(std=weight.shape[1] ** -0.5)
        x0, y = (torch.randn(1, rows, d).to(dtype) for _ in range(2))
    return block.to(dtype), x0, y


def gemms(
    block: Block, x0: torch.Tensor, y: torch.Tensor, fused: bool, backward: bool = False
) -> Call:
    """The GEMMs of the block alone through ``torch.mm``, on inputs of the right shape.

    `fused` joins gate/up and q/k/v into one weight each (4 GEMMs, copies of the weights); else 7
    GEMMs. `backward` adds the gradients of operand and weight: three times as many.
    """
    y2, h = y[0].detach(), x0[0].detach()
    hidden = torch.randn(len(h), block.down_proj.in_features, device=h.device).bfloat16()
    groups = [(block.gate_proj, block.up_proj), (block.q_proj, block.k_proj, block.v_proj)]
    pairs = [(y2, block.o_proj.weight), (hidden, block.down_proj.weight)]
    for group in groups:
        weights = [linear.weight for linear in group]
        pairs += [(h, weight) for weight in ([torch.cat(weights)] if fused else weights)]
    return products([(operand, weight.detach()) for operand, weight in pairs], backward)


def reference(block: Block, x0: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The outputs in fp32, eager, with `block`'s weights upcast; in chunks of rows, to bound the
    memory.
    """
    exact = copy.deepcopy(block).float()
    chunks = zip(x0.split(REFERENCE_ROWS, dim=1), y.split(REFERENCE_ROWS, dim=1), strict=True)
    parts = [exact(part_x0.float(), part_y.float()) for part_x0, part_y in chunks]
    return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))


def _accuracy(variants: Variants, block: Block, x0: torch.Tensor, y: torch.Tensor) -> dict:
    """Relative error of each output of each variant that computes them."""
    exact = reference(block, x0, y)
    return {
        name: {
            output: relative_error(value.reshape(truth.shape), truth)
            for output, value, truth in zip(OUTPUTS, call(), exact, strict=True)
        }
        for name, call in variants.calls.items()
        if not name.startswith("gemms")
    }


@torch.no_grad()
def run(job: Job, variants: Variants) -> dict:
    """Measure one size; see :mod:`benchmarks.runner` for the fields of `job`.

    Returns:
        what :meth:`Variants.measure` does, with ``"shape"``, ``"profile"`` and
        ``"accuracy": {variant: {output: error}}``.
    """
    block, x0, y = build(job.size, job.length, job.norm)

    def compiled(backend: str = "inductor", mode: str | None = None) -> Call:
        register(backend)
        own = torch.compile(copy.deepcopy(block), fullgraph=True, backend=backend, mode=mode)
        return lambda: own(x0, y)

    variants.add("eager", lambda: lambda: block(x0, y))
    variants.add("gemms", lambda: gemms(block, x0, y, fused=False))
    variants.add("gemms_fused", lambda: gemms(block, x0, y, fused=True))
    variants.add("compile", compiled)
    variants.add("max_autotune", lambda: compiled(mode="max-autotune-no-cudagraphs"))
    variants.add("coda", lambda: compiled(backend=job.backend))
    if job.ceiling and device() == "cuda":
        path = Path(job.ceiling)
        variants.add("ceiling", lambda: ceiling.make(path, block, x0, y))
    variants.add_graphs(("compile", "max_autotune", "coda"))
    result = variants.measure(job.rounds)
    d, f, kv = widths(job.size)
    result["shape"] = {"M": job.length, "d": d, "f": f, "kv": kv, "norm": job.norm}
    result["profile"] = variants.profile(("coda", "compile", "max_autotune"))
    accuracy = variants.attempt("accuracy", lambda: _accuracy(variants, block, x0, y))
    result["accuracy"] = accuracy or {}
    return result
