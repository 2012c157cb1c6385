# SPDX-License-Identifier: Apache-2.0
"""Steps of a diffusion transformer: modulated norms, gates, GELU, a batch of 2 for guidance.

    python examples/image.py [coda|inductor|eager]

Tiny on a CPU, with the widths of SD3.5 Large on a GPU. With diffusers the call is the same:
``pipe.transformer.compile(backend="coda")``. Compare backends in separate processes.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coda_inductor


class Block(nn.Module):
    """Attention and MLP, each between a modulated norm and a gated residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        parts = self.modulation(F.silu(step))[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


class Transformer(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, step)
        return x


def main() -> None:
    """Measure steps at two resolutions."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "coda"
    gpu = torch.cuda.is_available()
    width, heads, layers, steps = (2432, 38, 4, 20) if gpu else (128, 4, 2, 3)
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    model = Transformer(width, heads, layers).to(device, dtype).eval().requires_grad_(False)
    denoise = model if backend == "eager" else torch.compile(model, backend=backend, dynamic=True)
    for tokens in (1024, 4096) if gpu else (64, 144):  # the second resolution compiles nothing
        x = torch.randn(2, tokens, width, device=device, dtype=dtype)
        step = torch.randn(2, width, device=device, dtype=dtype)
        denoise(x, step)
        begin = time.perf_counter()
        for _ in range(steps):
            y = denoise(x, step)
        deviation = float(y.float().std())  # waits for the GPU
        took = f"{(time.perf_counter() - begin) / steps:.4f} s a step"
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if gpu else ""
        speed = f", {took}{peak}" if gpu else ""
        print(f"{tokens} tokens, standard deviation {deviation:.3f}{speed}")
    if backend == "coda":
        for report in coda_inductor.reports():  # none of graphs from torch's compile cache
            print(report.summary)
    if not gpu:
        print("This machine has no GPU: the example runs, and its speed would say nothing.")


if __name__ == "__main__":
    main()
