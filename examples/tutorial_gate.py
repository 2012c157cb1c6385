# SPDX-License-Identifier: Apache-2.0
"""Measure a gate of your own: eager, torch.compile and coda with the pattern of docs/tutorial.md.

The block is the MLP half of a Transformer layer, RMSNorm, gate and up projections, mish(gate) * up,
down projection and residual, with the widths of Llama-3.2-1B on a GPU and small ones elsewhere.
Prints times of the forward pass and of a training step, and errors against float32.

Usage: python3 examples/tutorial_gate.py mish_glu.py [--rows 8192] [--rounds 30]
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from coda_inductor.backend import coda
from coda_inductor.cli.speed import medians

#: (rows, width, hidden width) by device.
SIZES = {"cuda": (8192, 2048, 8192), "cpu": (256, 256, 704)}


class Block(nn.Module):
    """(..., width) -> (..., width)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        n = self.norm(x)
        return x + self.down(F.mish(self.gate(n)) * self.up(n))


def main() -> None:
    """Compile, compare, time, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pattern", type=Path, help="the pattern file")
    parser.add_argument("--rows", type=int, help="tokens in the batch")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, width, hidden = SIZES[device]
    rows = arguments.rows or rows

    torch.manual_seed(0)
    # Two blocks, so that there is a GEMM in front of the second norm.
    model = nn.Sequential(Block(width, hidden), Block(width, hidden)).to(device, torch.bfloat16)
    x, dy = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    ours = functools.partial(coda, options={"patterns": [str(arguments.pattern)]})
    variants: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": model,
        "torch.compile": torch.compile(model),
        "coda": torch.compile(model, backend=ours),
    }

    def forward(function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return function(x)

    def step(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        output = function(leaf)
        return [output.detach(), *torch.autograd.grad(output, [leaf, *model.parameters()], dy)]

    want = float32(model, x, dy)
    errors = {name: worst(step(function), want) for name, function in variants.items()}
    times = [
        medians({n: functools.partial(what, f) for n, f in variants.items()}, arguments.rounds)
        for what in (forward, step)
    ]
    print(
        f"\n{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, bfloat16, {rows} rows,"
    )
    print(f"two blocks of width {width}, hidden {hidden}; medians of {arguments.rounds}\n")
    header = ["", "forward, ms", "forward and backward, ms", "worst error against float32"]
    rows_of = [[n, *(f"{t[n]:.3f}" for t in times), f"{errors[n]:.2e}"] for n in variants]
    rows_of.append(["coda / torch.compile", *(ratio(t) for t in times), ""])
    print(tabulate(rows_of, header, tablefmt="github", disable_numparse=True))


def ratio(times: dict[str, float]) -> str:
    """How many times as fast as torch.compile."""
    return f"{times['torch.compile'] / times['coda']:.3f} x as fast"


def float32(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Output and gradients of the same weights in float32."""
    wide, leaf = copy.deepcopy(model).float(), x.float().requires_grad_()
    output = wide(leaf)
    return [output.detach(), *torch.autograd.grad(output, [leaf, *wide.parameters()], dy.float())]


def worst(have: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error (Frobenius) of any of them."""
    pairs = zip(have, want, strict=True)
    return max(((h.float() - w).norm() / w.norm()).item() for h, w in pairs)


if __name__ == "__main__":
    main()
