# SPDX-License-Identifier: Apache-2.0
"""Tensors as a site has them, of random values or of none."""

from __future__ import annotations

import torch
from torch import Tensor

from coda_inductor.program.scales import scaled
from coda_inductor.select.site import Site

#: The matrices A, the matrices B, and the epilogue's operands.
Given = tuple[list[Tensor], list[Tensor], list[Tensor]]


def tensors(site: Site, device: torch.device | str, *, values: bool = True) -> Given:
    """(as_, bs, operands) of one call of the op for ``site``, with its dtypes and majors. Without
    ``values`` they hold anything, and the GPU has nothing to do; on the meta device, which is
    enough to ask for kernels, nothing."""
    normal = torch.randn if values else torch.empty
    program, m, n = site.program, site.m, site.n

    def matrix(rows: int, columns: int, row_major: bool, dtype: str, scale: float = 1.0) -> Tensor:
        shape = (rows, columns) if row_major else (columns, rows)
        made = (normal(shape, device=device) * scale).to(getattr(torch, dtype))
        return made if row_major else made.t()

    as_ = [matrix(m, k, site.a_major == "k", program.a_dtype) for k in site.ks]
    weights = [k for k in site.ks for _ in program.accs]
    # In FP8 small weights are mostly zeros, which heat nothing: one of the scales is small instead.
    scale = [1.0 if program.fp8 else k**-0.5 for k in weights]
    bs = [
        matrix(k, n, site.b_major == "n", program.b_dtype, s)
        for k, s in zip(weights, scale, strict=True)
    ]
    small = {next(iter(found.names), None) for found in scaled(program).values()}
    operands = []
    for operand in program.operands:
        kind = getattr(torch, operand.dtype)
        if operand.kind == "tile":
            made = normal(m, n, device=device)
        elif operand.kind == "row":
            made = 1 + 0.1 * torch.randn(n, device=device)
            made = made.repeat_interleave(2) if program.paired else made
        elif operand.kind == "col":  # a statistic of a row: positive, as most are
            made = 0.5 + torch.rand(m, device=device)
        elif operand.kind == "table":  # cosines and sines
            made = normal(m, program.head, device=device).clamp(-1, 1)
        else:
            made = torch.ones((), device=device)
        if operand.name in small:
            made = made * site.ks[0] ** -0.5
        operands.append(made.to(kind))
    return _by_address(as_), _by_address(bs), operands


def size(site: Site) -> int:
    """Bytes that a measurement of ``site`` needs at most, about: inputs, outputs of two candidates
    at a time, and what plain ops keep between them."""
    program = site.program
    factors = sum(site.m * k + len(program.accs) * site.n * k for k in site.ks) * 2
    tiles = len(program.loads) + 2 * len(program.stores)
    return factors * 2 + site.m * site.n * (2 * tiles + 8 * len(program.accs))


def _by_address(made: list[Tensor]) -> list[Tensor]:
    """In the order in which they lie, so that one variant of a kernel serves."""
    return made if made[0].is_meta else sorted(made, key=Tensor.data_ptr)
