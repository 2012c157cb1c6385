# SPDX-License-Identifier: Apache-2.0
"""Suite `grid`: the part of a Llama layer that is not attention, at many widths and rows.

    x1 = x0 + o_proj(y)
    x2 = x1 + down(silu(gate(norm1(x1))) * up(norm1(x1)))
    q, k, v = q_proj(norm2(x2)), k_proj(norm2(x2)), v_proj(norm2(x2))

Separate q/k/v and gate/up ``nn.Linear``, as users write it: its forward pass, and forward and
backward for random gradients of the outputs. The variants share weights and inputs.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from . import gradients
from .cases import FORWARD, TRAINING, Case
from .gradients import REFERENCE_ROWS
from .measure import Call, device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Way

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
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INPUTS, OUTPUTS = ("x0", "y"), ("x2", "q", "k", "v")
#: Of the grid: each width has four rows of its own beside the fifth, which alternates.
FOUR = (512, 4096, 5000, 8192)
FIFTH = {"1B": 1000, "3B": 2048, "8B": 1000, "13B": 2048, "32B": 1000, "70B": 2048}
LONGEST = {"1B": 16384, "3B": 16384}
HALF = (("1B", 4096), ("8B", 5000), ("13B", 2048))
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


class Block(nn.Module):
    """The layer without its attention: ``(x0, y) -> (x2, q, k, v)``; x0, y, x2, q are (1, M, d), k,
    v (1, M, kv).
    """

    def __init__(self, d: int, f: int, kv: int):
        super().__init__()
        self.o_proj = nn.Linear(d, d, bias=False)
        self.norm1 = HFRMSNorm(d, EPS)
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)
        self.norm2 = HFRMSNorm(d, EPS)
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
    size: str, rows: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Block, torch.Tensor, torch.Tensor]:
    """A block of unit-gain random weights and its inputs x0, y of shape (1, rows, d), all of
    `dtype`, on the device. `size` as :func:`widths` takes it.
    """
    torch.manual_seed(0)
    d, f, kv = widths(size)
    with torch.device(device()):
        block = Block(d, f, kv)
        for name, weight in block.named_parameters():
            if name.startswith("norm"):
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
            else:
                weight.normal_(std=weight.shape[1] ** -0.5)
        x0, y = (torch.randn(1, rows, d).to(dtype) for _ in range(2))
    return block.to(dtype), x0, y


def reference(block: Block, x0: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The outputs in fp32, eager, with `block`'s weights upcast; in chunks of rows, to bound the
    memory.
    """
    exact = copy.deepcopy(block).float()
    chunks = zip(x0.split(REFERENCE_ROWS, dim=1), y.split(REFERENCE_ROWS, dim=1), strict=True)
    parts = [exact(part_x0.float(), part_y.float()) for part_x0, part_y in chunks]
    return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))


class Layer:
    """The layer of one case with its inputs: made once, used by all variants.

    Raises KeyError where its size is none that :func:`widths` takes.
    """

    def __init__(self, case: Case):
        d, f, kv = widths(case.size)
        self.shape = {"M": case.rows, "d": d, "f": f, "kv": kv}
        self.training = case.training
        self.block, x0, y = build(case.size, case.rows, DTYPES[case.dtype])
        self.inputs = [x0, y]
        self.given: list[torch.Tensor] = []
        if self.training:
            self.inputs = [x0.requires_grad_(), y.requires_grad_()]
            self.given = [torch.randn(*x0.shape[:2], n, device=x0.device).to(x0) for n in
                          (d, d, kv, kv)]  # fmt: skip

    def compiled(self, way: Way) -> Call:
        """The layer, or its forward and backward, compiled that way when first called."""
        function = way.compile(self.block, **({"fullgraph": True} if way.backend else {}))
        if self.training:
            return gradients.step(function, self.inputs, self.block.parameters(), self.given)
        return lambda: function(*self.inputs)

    def errors(self, calls: dict[str, Call]) -> dict[str, dict[str, float]]:
        """Relative error of each output or gradient of each call, against fp32 in eager."""
        labels: Sequence[str] = OUTPUTS
        if self.training:
            _, truths = gradients.reference(self.block, self.inputs, self.given)
            labels = gradients.names(self.block, INPUTS)
        else:
            truths = list(reference(self.block, *self.inputs))
        return {name: gradients.errors(labels, call(), truths) for name, call in calls.items()}


def grid() -> list[Case]:
    """The cases of suite `grid`: 70 layers."""
    places = [(size, rows) for size, fifth in FIFTH.items() for rows in sorted((*FOUR, fifth))]
    places += list(LONGEST.items())
    modes = (FORWARD, TRAINING)
    cases = [Case(size, rows, mode) for size, rows in places for mode in modes]
    return cases + [Case(size, rows, mode, "fp16") for size, rows in HALF for mode in modes]


def variants(_case: Case) -> tuple[str, ...]:
    """The variants that a case has, of :func:`benchmarks.cases.ways`."""
    return ("compile", "coda", "max_autotune", "coda_options")
