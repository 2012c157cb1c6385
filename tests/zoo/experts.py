# SPDX-License-Identifier: Apache-2.0
"""Blocks of experts as people write them, of grouped products, for the tests of mixtures."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (its op multiplies float64)
from torch import Tensor, nn

D, H, E, K = 16, 64, 5, 2


def count(harness, op) -> int:
    return harness.ops()[str(op)]


def fused(harness) -> list[str]:
    """Of each grouped site, how it multiplies."""
    sites = [s.program for s in harness.fused if s.program.grouped]
    return ["gathered " * (p.routes[1] is not None) + ("pair" if p.paired else "") for p in sites]


def plain(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, offs)


def sorted_by(ids):
    return torch.sort(ids)[1]


def stable(ids):
    return torch.argsort(ids, stable=True)


def histogram(ids, perm):
    return torch.histc(ids[perm].float(), bins=E, min=0, max=E - 1)


def histogram_of_all(ids, perm):
    return torch.histc(ids.float(), bins=E, min=0, max=E)


def selected(x, perm, k):
    return x.index_select(0, torch.div(perm, k, rounding_mode="floor"))


def gathered(x, perm, k):
    return torch.gather(x, 0, (perm // k).reshape(-1, 1).expand(-1, x.shape[1]))


def inverse_of(perm):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0), device=perm.device)
    return inverse


def viewed(y, w, perm, x, k):
    y = y * w.reshape(-1)[perm].unsqueeze(-1)
    return y[inverse_of(perm)].view(x.shape[0], k, x.shape[1]).sum(dim=1)


def weighted_last(y, w, perm, x, k):
    y = y[torch.argsort(perm)].view(-1, k, x.shape[1])
    return (y * w.unsqueeze(-1)).sum(1)


def scattered(y, w, perm, x, k):
    y = y * w.reshape(-1)[perm].reshape(-1, 1)
    index = (perm // k).reshape(-1, 1).expand(-1, x.shape[1])
    return torch.zeros_like(x).scatter_add(0, index, y)


def onto_shared(y, w, perm, x, k):
    """Onto what shared experts gave."""
    return torch.tanh(x).index_add(0, perm // k, y * w.reshape(-1)[perm, None])


def multiplied(y, w, perm, x, k):
    rows = torch.zeros(y.shape[0], y.shape[1], dtype=y.dtype)
    rows[perm] = y
    return torch.bmm(w.reshape(-1, 1, k), rows.reshape(-1, k, x.shape[1])).squeeze(1)


def unweighted(y, w, perm, x, k):
    return y[torch.argsort(perm)].reshape(-1, k, x.shape[1]).sum(1)


SORTS = (sorted_by, stable)
COUNTS = (histogram, histogram_of_all)
GATHERS = {"index": lambda x, perm, k: x[perm // k], "select": selected, "gather": gathered}
SUMS = (viewed, weighted_last, scattered, onto_shared, multiplied, unweighted)


def halves(x, offs, mm, w13, *_):
    gate, up = mm(x, w13.transpose(1, 2), offs).chunk(2, -1)
    return F.silu(gate) * up


def two_weights(x, offs, mm, _w13, w1, w3):
    gate = F.silu(mm(x, w1.mT, offs))
    return gate * mm(x, w3.mT, offs)


def no_gate(x, offs, mm, _w13, w1, _w3):
    return F.gelu(mm(x, w1.transpose(1, 2), offs))


def interleaved(x, offs, mm, w13, *_):
    z = mm(x, w13.transpose(1, 2), offs)
    return (z[..., ::2] + 1) * torch.sigmoid(z[..., 1::2])


@dataclass
class Block(nn.Module):
    """Experts (x (T, D), ids (T, K), w (T, K)) -> (T, D), spelled as it says."""

    sort: Callable = sorted_by
    count: Callable = histogram
    gather: str = "index"
    up: Callable = halves
    sum: Callable = viewed
    mm: Callable = plain
    dtype: torch.dtype = torch.float64
    experts: int = E
    masked: bool = False
    biased: bool = False
    biased_up: bool = False

    def __post_init__(self):
        super().__init__()
        shapes = {"w13": (self.experts, 2 * H, D), "w1": (self.experts, H, D),
                  "w3": (self.experts, H, D), "w2": (self.experts, D, H)}  # fmt: skip
        if self.biased:
            shapes["bias"] = (self.experts, D)
        if self.biased_up:
            shapes |= {f"bias{n}": (self.experts, n) for n in (H, 2 * H)}
        for name, shape in shapes.items():
            weight = torch.randn(shape, dtype=torch.float64) * shape[-1] ** -0.5
            setattr(self, name, nn.Parameter(weight.to(self.dtype)))

    __hash__ = nn.Module.__hash__

    def bias_of(self, weight):
        return getattr(self, f"bias{weight.shape[-1]}")

    def forward(self, x, ids, w):
        k, flat = ids.shape[1], ids.reshape(-1)
        perm = self.sort(flat)
        if self.masked:
            own, perm = torch.sort(flat)
        offs = torch.cumsum(self.count(flat, perm), 0, dtype=torch.int32)
        rows, own_bias = GATHERS[self.gather](x, perm, k), flat[perm]
        mask = None
        if self.masked:  # as transformers 5.17 does, for pairs of no expert
            mask = (own >= self.experts).unsqueeze(-1)
            own_bias = own.clamp_(max=self.experts - 1)
            rows.masked_fill_(mask, 0.0)

        def mm(rows, weight, offs):
            z = self.mm(rows, weight, offs)
            z = z + self.bias_of(weight)[own_bias] if self.biased_up else z
            return z.masked_fill(mask, 0.0) if self.masked else z

        a = self.up(rows, offs, mm, self.w13, self.w1, self.w3)
        y = self.mm(a, self.w2.transpose(1, 2), offs)
        if self.biased:  # gpt-oss
            y = y + self.bias[own_bias]
        if self.masked:
            y = y.masked_fill(mask, 0.0)
        return self.sum(y, w, perm, x, k)


def given(tokens: int = 7, k: int = K, experts: int = E, dtype=torch.float64):
    """X with a gradient, ids without, w with one."""
    x = torch.randn(tokens, D, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.zeros(0, k, dtype=torch.int64)
    if tokens:
        ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    w = torch.rand(tokens, k, dtype=torch.float64).to(dtype).requires_grad_()
    return x, ids, w
