# SPDX-License-Identifier: Apache-2.0
"""A small decoder that may be sharded in any way, and training steps of it: compiled and spread
over ranks, or plain on one with all of their data."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

VOCABULARY, HEADS, LENGTH, STEPS = 64, 4, 8, 3
OPTIONS = {"gate": "always", "reference": True, "strict": True}


class Block(nn.Module):
    """Norm, causal attention, residual; norm, SwiGLU, residual."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        n = self.norm1(x)
        q, k, v = self.q(n), self.k(n), self.v(n)
        heads = (*q.shape[:2], -1, self.width // HEADS)  # those of this rank
        q, k, v = (t.view(heads) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        n = self.norm2(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, layers: int = 2, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.trunk(tokens))

    def trunk(self, tokens):
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.norm(x)


def decoder(layers: int = 2, width: int = 32) -> Decoder:
    """The same one on each rank, in float64."""
    torch.manual_seed(0)
    model = Decoder(layers, width).double()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a weight in the wrong place
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batches(ranks: int = 1, steps: int = STEPS) -> list[torch.Tensor]:
    """(2 * ranks, LENGTH) tokens for each step."""
    generator = torch.Generator().manual_seed(1)
    shape = (2 * ranks, LENGTH)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(steps)]


def mine(tokens: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a batch."""
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fresh() -> None:
    """Nothing is compiled or counted yet."""
    torch._dynamo.reset()
    counters.clear()


def fired() -> dict[str, int]:
    """What counted since :func:`fresh`."""
    return dict(Counter(counters["coda"]))


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What coda_inductor warns of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("coda_inductor")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def train(
    model: nn.Module,
    data: list[torch.Tensor],
    call: Callable[..., torch.Tensor] | None = None,
    loss: Callable[..., torch.Tensor] = loss_of,
) -> None:
    """A step of AdamW for each batch. ``call`` stands for the model."""
    step = model if call is None else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in data:
        loss(full(step(tokens)), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_trained_as(model: nn.Module, plain: nn.Module, tolerance: float = 1e-6) -> None:
    """Parameters are those of ``plain``, relative to each one's norm."""
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, have), want in pairs:
        error = (full(have.detach()) - want).norm() / want.norm()
        assert error <= tolerance, f"{name}: {error}"


def compile_head_and_loss(model: Decoder, **how: Any) -> None:
    """As one graph, and the norm as another; what calls the blocks runs as it is, and is no part of
    the graph behind it. The model's result is the loss then."""
    trunk = torch.compiler.disable(model.trunk)
    model.forward = lambda tokens: loss_of(model.head(trunk(tokens)), tokens)
    model.norm.compile(**how)
    model.compile(**how)


def single(data: list[torch.Tensor], layers: int = 2, width: int = 32) -> Decoder:
    """Trained by eager PyTorch on one rank with all data."""
    model = decoder(layers, width)
    train(model, data)
    return model
