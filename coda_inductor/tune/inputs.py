# SPDX-License-Identifier: Apache-2.0
"""Tensors as a site has them, of random values or of none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coda_inductor.mainloop.readings import reading_of
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

    def made(dtype: str, scale: float) -> Callable[..., Tensor]:
        return lambda *shape: (normal(shape, device=device) * scale).to(getattr(torch, dtype))

    as_, bs = reading_of(program, len(site.ks)).inputs(site, made)
    small = {next(iter(found.names), None) for found in scaled(program).values()}
    operands = []
    for operand in program.operands:
        kind = getattr(torch, operand.dtype)
        if operand.kind == "tile":
            value = normal(m, n, device=device)
        elif operand.kind == "row":
            value = 1 + 0.1 * torch.randn(n, device=device)
            value = value.repeat_interleave(len(program.accs))
        elif operand.kind == "col":  # a statistic of a row: positive, as most are
            value = 0.5 + torch.rand(m, device=device)
        elif operand.kind == "table":  # cosines and sines
            value = normal(m, program.head, device=device).clamp(-1, 1)
        else:
            value = torch.ones((), device=device)
        if operand.name in small:
            value = value * site.ks[0] ** -0.5
        operands.append(value.to(kind))
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
