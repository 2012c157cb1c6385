# SPDX-License-Identifier: Apache-2.0
"""The reference executor: an epilogue program as plain torch ops, on any device and in any dtype.

It is the oracle of the tests, the fake implementation's shape rule, what runs when no kernel can
(traced into the graph, so that Inductor compiles it), and the definition of what programs mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coda_inductor.program import OPS, EpilogueProgram

#: How the values of a tile, and then the partials of all tiles, are combined.
COMBINE: dict[str, Callable[..., Tensor]] = {
    "add": torch.sum,
    "max": torch.amax,
    "logsumexp": torch.logsumexp,
}


def compute_dtype(program: EpilogueProgram) -> torch.dtype:
    """Values live in float32 on the tile; in float64 when the GEMM is float64."""
    return torch.float64 if program.in_dtype == "float64" else torch.float32


def run(
    program: EpilogueProgram,
    as_: Sequence[Tensor],
    bs: Sequence[Tensor],
    operands: Sequence[Tensor],
    *,
    exact: bool = True,
) -> list[Tensor]:
    """Run ``program`` on ``as_``, each (M, K_j), and ``bs``, each (K_j, N).

    With one accumulator it is the sum of all ``as_[j] @ bs[j]``; the two of a paired program are
    ``as_[0] @ bs[0]`` and ``as_[0] @ bs[1]``.

    ``operands`` follow ``program.operands``: tile (M, N), row (N,) or for a paired program (2N,),
    every value twice, col (M,), scalar ().
    With ``exact`` the accumulators are not rounded, which is what kernels compute; without, each
    product is rounded to the inputs' dtype first, which is what an unfused graph does.

    Returns the stores, each (M, N), then the partials of the reductions over one tile that covers
    everything: (M, 1) for rows, (1, N) for columns, in the compute dtype.
    """
    wide = compute_dtype(program)
    env: dict[str, Tensor] = {}

    def product(a: Tensor, b: Tensor) -> Tensor:
        return accumulated(a, b, wide) if exact else (a @ b).to(wide)

    if program.paired:
        env.update({name: product(as_[0], b) for name, b in zip(program.accs, bs, strict=True)})
    else:
        products = [product(a, b) for a, b in zip(as_, bs, strict=True)]
        env[program.accs[0]] = functools.reduce(torch.add, products)
    for operand, tensor in zip(program.operands, operands, strict=True):
        value = tensor.to(wide)
        if operand.kind == "row" and program.paired:
            value = value[::2]
        env[operand.name] = value[:, None] if operand.kind == "col" else value
    shape = env[program.accs[0]].shape
    for step in program.steps:
        args = [_value(arg, env, wide, as_[0].device) for arg in step.args]
        env[step.name] = OPS[step.op].torch(*args)
    outputs = [
        env[store.value].to(getattr(torch, store.dtype)).expand(shape).contiguous()
        for store in program.stores
    ]
    for reduce in program.reduces:
        dim = 1 if reduce.axis == "row" else 0
        value = env[reduce.value].expand(shape)
        outputs.append(COMBINE[reduce.combine](value, dim, keepdim=True))
    return outputs


def accumulated(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """``a @ b`` as its accumulators hold it: (M, K) times (K, N), in ``wide``."""
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _value(arg: str | float, env: dict[str, Tensor], wide: torch.dtype, device: torch.device):
    if isinstance(arg, str):
        return env[arg]
    # torch.maximum, torch.where and friends take no Python scalars: a 0-dim tensor serves all ops.
    return torch.full((), arg, dtype=wide, device=device)


def output_shapes(
    program: EpilogueProgram, m, n, tile_m: int | None = None, tile_n: int | None = None
) -> list[tuple]:
    """Shapes of what one run returns, for tiles of ``tile_m`` x ``tile_n`` (None: one tile)."""
    shapes: list[tuple] = [(m, n) for _ in program.stores]
    for reduce in program.reduces:
        if reduce.axis == "row":
            shapes.append((m, -(-n // tile_n) if tile_n else 1))
        else:
            shapes.append((-(-m // tile_m) if tile_m else 1, n))
    return shapes
