"""A hand-composed layer as one more baseline: its forward, run on our weights in our process.

The file given by ``--ceiling`` must offer ``Hand(d, f, q, M)`` with ``fwd(x0, y)``, and
``warm``/``CFG`` to compile its kernels ahead of time in parallel. It differs from ours in its
favour (gate/up interleaved in one weight, q/k/v in one weight: two GEMMs instead of five) and
against it (it stores the pre-activations that training needs).
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

FORWARD_KINDS = ("rms_partial", "gateup", "rstd")


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


def _warm(module: ModuleType) -> None:
    """Compile the forward kernels in every config into the on-disk cache, in parallel."""
    jobs = [(kind, 0, config) for kind in FORWARD_KINDS for config in module.CFG]
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        for job, outcome in pool.map(module.warm, jobs, chunksize=1):
            if outcome != "ok":
                print("ceiling: could not compile", job, outcome)


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
    module = _load(path)
    _warm(module)
    rows, width = x0.shape[-2:]
    heads = [block.q_proj, block.k_proj, block.v_proj]
    splits = [head.out_features for head in heads]
    hand = module.Hand(width, block.gate_proj.out_features, sum(splits), rows)
    hand.Wo.copy_(block.o_proj.weight)
    hand.Wgu[0::2].copy_(block.gate_proj.weight)
    hand.Wgu[1::2].copy_(block.up_proj.weight)
    hand.Wd.copy_(block.down_proj.weight)
    hand.Wq.copy_(torch.cat([head.weight for head in heads]))
    hand.g1.copy_(block.norm1.weight)
    hand.g2.copy_(block.norm2.weight)
    x0, y = x0.view(rows, width), y.view(rows, width)

    def forward() -> tuple[torch.Tensor, ...]:
        x2, qkv, _ = hand.fwd(x0, y)
        return x2, *qkv.split(splits, dim=-1)

    return forward
