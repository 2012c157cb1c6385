# SPDX-License-Identifier: Apache-2.0
"""Tensors with the shapes and dtypes of a site's, with random values or uninitialized."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coda_inductor.program.operands import ROUTES
from coda_inductor.program.scales import scaled
from coda_inductor.select.site import Site

#: The matrices A, the matrices B, and the epilogue's operands.
Inputs = tuple[list[Tensor], list[Tensor], list[Tensor]]


def tensors(site: Site, device: torch.device | str, *, values: bool = True) -> Inputs:
    """(as_, bs, operands) of one call of the op for ``site``, with its dtypes and majors. Without
    ``values`` they are not initialized, so the GPU has nothing to do; tensors on the meta device
    suffice for requesting kernels."""
    normal = torch.randn if values else torch.empty
    program, m, n = site.program, site.m, site.n

    def factory(dtype: str, scale: float) -> Callable[..., Tensor]:
        return lambda *shape: (normal(shape, device=device) * scale).to(getattr(torch, dtype))

    as_, bs = site.reading.inputs(site, factory)
    routes = _routes(site, device)
    small = {next(iter(product.names), None) for product in scaled(program).values()}
    sizes = program.sizes(m, n, site.groups)
    operands = []
    for operand in program.operands:
        spec = operand.spec
        if spec.route:
            value = routes[operand.kind]
        else:
            shape = spec.shape(sizes, grouped=program.grouped)
            value = spec.sample((normal if spec.staged else torch.randn)(shape, device=device))
        if spec.columns:
            value = value.repeat_interleave(len(program.accs), -1)
        if operand.name in small:
            value = value * site.ks[0] ** -0.5
        operands.append(value.to(getattr(torch, operand.dtype)))
    return _by_address(as_), _by_address(bs), operands


def unfused(site: Site, inputs: Inputs) -> Inputs:
    """The same inputs as an unfused graph has them."""
    as_, bs = site.reading.unfused(site.program, *inputs[:2])
    return list(as_), list(bs), inputs[2]


def _routes(site: Site, device: torch.device | str) -> dict[str, Tensor]:
    """Operands by kind: the offsets of ``site.groups`` experts, and tokens in random order. Half of
    the rows are spread evenly and half by Zipf's law, as by routers that are not balanced yet,
    because the slowest expert decides."""
    if not site.groups:
        return {}
    share = 1 / torch.arange(1, site.groups + 1)
    share = share / share.sum() + 1 / site.groups
    edges = (share.cumsum(0) * (site.m / 2)).round().to(torch.int32)
    offsets = torch.cat([edges.new_zeros(1), edges]).to(device)
    top_k = site.m // site.rows if site.rows else 1
    index = torch.randperm(site.m, device=device) // max(top_k, 1)
    return dict(zip(ROUTES, (offsets, index), strict=True))


def size(site: Site) -> int:
    """An upper estimate of the bytes that a measurement of ``site`` needs: inputs, outputs of two
    candidates at a time, and intermediate results of plain ops."""
    program = site.program
    experts = max(site.groups, 1)
    factors = sum(site.m * k + experts * len(program.accs) * site.n * k for k in site.ks) * 2
    factors *= 2 if site.groups else 1  # unfused, parts of a weight are one, and rows lie in order
    tiles = len(program.loads) + 2 * len(program.stores)
    return factors * 2 + site.m * site.n * (2 * tiles + 8 * len(program.accs))


def _by_address(xs: Sequence[Tensor]) -> list[Tensor]:
    """``xs`` in the order of their addresses, so that one variant of a kernel suffices."""
    return [*xs] if xs[0].is_meta else sorted(xs, key=Tensor.data_ptr)
