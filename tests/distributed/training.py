# SPDX-License-Identifier: Apache-2.0
"""Training steps of a decoder: compiled and spread over ranks, or plain on one with all data."""

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from zoo.layers import VOCABULARY, Decoder

from coda_inductor import log

LENGTH, STEPS = 8, 3
OPTIONS = {"gate": "always", "reference": True, "strict": True}
HOW = {"backend": "coda", "options": OPTIONS}


def decoder(layers: int = 2, width: int = 32, **how: Any) -> Decoder:
    """The same one on each rank, in float64."""
    torch.manual_seed(0)
    return Decoder(layers, width, **how).double()


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batches(ranks: int = 1, steps: int = STEPS) -> list[torch.Tensor]:
    """(2 * ranks, LENGTH) tokens for each step."""
    generator = torch.Generator().manual_seed(1)
    shape = (2 * ranks, LENGTH)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(steps)]


def mine(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def mesh(device: str = "cpu"):
    return init_device_mesh(device, (dist.get_world_size(),))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fresh() -> None:
    """Nothing is compiled or counted yet."""
    torch._dynamo.reset()
    counters.clear()


def assert_fired(want: dict[str, int]) -> None:
    fired = Counter(counters["coda"])
    assert {name: fired[name] for name in want} == want, dict(fired)


@contextlib.contextmanager
def heard(alone: bool = True) -> Iterator[list[str]]:
    """What coda_inductor warns of: ``alone`` on this rank, whatever others have said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger, store = log.logger, log.default_store
    log.default_store = (lambda: None) if alone else store
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        log.default_store = store


def train(
    model: nn.Module,
    data: list[torch.Tensor],
    call: Callable[..., torch.Tensor] | None = None,
    loss: Callable[..., torch.Tensor] = loss_of,
    after: Callable[[nn.Module], None] = lambda _: None,
) -> None:
    """A step of AdamW for each batch. ``call`` stands for the model."""
    step = model if call is None else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in data:
        loss(full(step(tokens)), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(model)


@functools.cache
def single(ranks: int = 2, steps: int = STEPS, **how: Any) -> Decoder:
    """Trained by eager PyTorch on one rank with the data of all."""
    model = decoder(**how)
    train(model, batches(ranks, steps))
    return model


def assert_trained_as(model: nn.Module, plain: nn.Module, tolerance: float = 1e-6) -> None:
    """Parameters are those of ``plain``, relative to each one's norm."""
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, have), want in pairs:
        error = (full(have.detach()) - want).norm() / want.norm()
        assert error <= tolerance, f"{name}: {error}"


def distance(model: nn.Module, exact: nn.Module) -> float:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return sum((full(p.detach()).double() - q).norm().item() ** 2 for p, q in pairs) ** 0.5


def blocks(model: Decoder) -> Decoder:
    for block in model.layers:
        block.compile(**HOW)
    return model


def shard(model: Decoder, over: Any = None, **how: Any) -> Decoder:
    """FSDP2, block by block."""
    for part in (*model.layers, model):
        fully_shard(part, mesh=over or mesh(), **how)
    return model
