# SPDX-License-Identifier: Apache-2.0
"""A hand-composed layer as one more baseline, run on our weights in our process.

The file given by ``--ceiling`` must offer ``Hand(d, f, q, M)`` with ``fwd(x0, y)`` and ``bwd(dx2,
dqkv, saved)``, and ``warm``/``CFG`` to compile its kernels ahead of time in parallel. It differs
from ours in its favour (gate/up interleaved in one weight, q/k/v in one weight and their gradients
in one tensor: two GEMMs instead of five) and, without gradients, against it (it always stores the
pre-activations that training needs).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

    from .measure import Call

# kind of kernel, whether its weight is transposed
FORWARD_KINDS = (("rms_partial", 0), ("gateup", 0), ("rstd", 0))
BACKWARD_KINDS = (("rms_bwd", 1), ("dswiglu", 1))


def _load(path: Path) -> ModuleType:
    """Import the file under its own name, from `sys.path`: the workers of the pool import it
    likewise.

    Raises ImportError if another module has that name.
    """
    sys.path.append(str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ImportError(
            f"--ceiling {path.name}: the module name {path.stem!r} is taken; rename the file"
        )
    return module


def _warm(module: ModuleType, kinds: tuple[tuple[str, int], ...]) -> None:
    """Compile the kernels of `kinds` in every config into the on-disk cache, in parallel."""
    jobs = [(*kind, config) for kind in kinds for config in module.CFG]
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        for job, outcome in pool.map(module.warm, jobs, chunksize=1):
            if outcome != "ok":
                print("ceiling: could not compile", job, outcome)


def _hand(path: Path, block: Any, rows: int, kinds: tuple[tuple[str, int], ...]) -> Any:
    """The file's ``Hand`` for `rows` rows with copies of `block`'s weights, kernels compiled."""
    module = _load(path)
    _warm(module, kinds)
    heads = _heads(block)
    width, hidden = block.down_proj.weight.shape
    hand = module.Hand(width, hidden, sum(head.out_features for head in heads), rows)
    hand.Wo.copy_(block.o_proj.weight)
    hand.Wgu[0::2].copy_(block.gate_proj.weight)
    hand.Wgu[1::2].copy_(block.up_proj.weight)
    hand.Wd.copy_(block.down_proj.weight)
    hand.Wq.copy_(torch.cat([head.weight for head in heads]))
    hand.g1.copy_(block.norm1.weight)
    hand.g2.copy_(block.norm2.weight)
    return hand


def _heads(block: Any) -> list[Any]:
    return [block.q_proj, block.k_proj, block.v_proj]


@torch.no_grad()
def make(path: Path, block: Any, x0: torch.Tensor, y: torch.Tensor) -> Call:
    """The ceiling's forward on copies of `block`'s weights.

    Args:
        path: the file.
        block: a :class:`benchmarks.layer.Block` on CUDA, bf16.
        x0: residual, (1, M, d).
        y: attention output, (1, M, d).

    Returns:
        a call that gives ``(x2, q, k, v)`` as 2-D tensors of M rows.
    """
    splits = [head.out_features for head in _heads(block)]
    hand = _hand(path, block, x0.shape[1], FORWARD_KINDS)
    x0, y = x0[0], y[0]

    def forward() -> tuple[torch.Tensor, ...]:
        x2, qkv, _ = hand.fwd(x0, y)
        return x2, *qkv.split(splits, dim=-1)

    return forward


@torch.no_grad()
def make_step(
    path: Path, block: Any, x0: torch.Tensor, y: torch.Tensor, tangents: list[torch.Tensor]
) -> Call:
    """The ceiling's forward and backward on copies of `block`'s weights.

    Args:
        path: the file.
        block: a :class:`benchmarks.layer.Block` on CUDA, bf16.
        x0: residual, (1, M, d).
        y: attention output, (1, M, d).
        tangents: gradients of x2, q, k, v, each (1, M, its width).

    Returns:
        a call that gives the gradients of x0, y and `block`'s parameters, in their order there,
        as 2-D tensors (norm weights: 1-D).
    """
    splits = [head.out_features for head in _heads(block)]
    hand = _hand(path, block, x0.shape[1], FORWARD_KINDS + BACKWARD_KINDS)
    x0, y = x0[0].detach(), y[0].detach()
    dx2, dqkv = tangents[0][0], torch.cat(tangents[1:], dim=-1)[0]
    order = [name for name, _ in block.named_parameters()]
    dtype = block.norm1.weight.dtype

    @torch.no_grad()
    def forward_backward() -> tuple[torch.Tensor, ...]:
        _, _, saved = hand.fwd(x0, y)
        dx0, dy, dwo, dwgu, dwd, dwqkv, dnorm1, dnorm2 = hand.bwd(dx2, dqkv, saved)
        dwq, dwk, dwv = dwqkv.split(splits)
        found = {
            "o_proj.weight": dwo,
            "norm1.weight": dnorm1.to(dtype),
            "gate_proj.weight": dwgu[0::2],
            "up_proj.weight": dwgu[1::2],
            "down_proj.weight": dwd,
            "norm2.weight": dnorm2.to(dtype),
            "q_proj.weight": dwq,
            "k_proj.weight": dwk,
            "v_proj.weight": dwv,
        }
        return dx0, dy, *(found[name] for name in order)

    return forward_backward
