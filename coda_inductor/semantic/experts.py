# SPDX-License-Identifier: Apache-2.0
"""A mixture's experts: rows of tokens, sorted by expert, times the weights of each expert.

T tokens choose top_k of E experts each: M = T * top_k pairs. ``route`` sorts them by expert;
``experts_up`` gathers rows of x while it multiplies, ``experts_down`` multiplies and sums the rows
of each token, weighted by the router. The user's own code runs between the two. Their gradients use
the same few ops, so that neither direction writes the gathered rows of tokens, or their gradients,
to memory (SonicMoE, arXiv 2512.14080, section 4):

    y = a W                                     out_t = sum of w_i y_i over the pairs i of token t
    q_i = dout_t W^T                            one product, rows of dout gathered
    dw_i = y_i dout_t = a_i q_i                 rule R3: y is not needed again
    da = w q;  dW = (w a)^T dout                the weight waits until after the product (R1, R4)

A group of rows may be empty. Pairs of no expert (an id outside of 0 ... E - 1) come after all
groups; their values are never read, and they add nothing.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_inductor.compat import grouped_mm as multiply
from coda_inductor.program.grouped import grouped_product
from coda_inductor.semantic.define import compose, define, opaque, schema_text


def route(ids: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort pairs by expert. ``ids`` (M,) of any integer dtype: the expert of each pair, with the
    pairs of a token next to each other.

    Returns, int32: rows (M,), the token of each sorted pair; perm (M,), its original index, with
    equal experts in order; inverse (M,), the sorted index of each pair; offsets (E + 1,), the first
    index of each expert, and the end.
    """
    expert = torch.where((ids >= 0) & (ids < experts), ids, experts)
    perm = torch.argsort(expert, stable=True)
    count = torch.arange(ids.shape[0], device=ids.device)
    inverse = torch.empty_like(perm).scatter_(0, perm, count)
    edges = torch.arange(experts + 1, device=ids.device, dtype=expert.dtype)
    offsets = (expert[None, :] < edges[:, None]).sum(1)
    results = (torch.div(perm, top_k, rounding_mode="floor"), perm, inverse, offsets)
    rows, perm, inverse, offsets = (x.to(torch.int32) for x in results)
    return rows, perm, inverse, offsets


def combine(
    y: Tensor,
    weights: Tensor | None,
    inverse: Tensor,
    offsets: Tensor,
    top_k: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weighted sum of each token's rows of ``y`` (M, d): (T, d) in ``dtype``, or y's.
    ``weights`` are (T, top_k), or None for ones; sums are in order and in float32. ``inverse`` and
    ``offsets`` are from :func:`route`; pairs without an expert add nothing."""
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = y[inverse].to(wide)
    if weights is not None:
        rows = rows * weights.reshape(-1, 1).to(wide)
    rows = torch.where((inverse < offsets[-1])[:, None], rows, 0.0)
    return rows.view(-1, top_k, y.shape[1]).sum(1).to(dtype or y.dtype)


def grouped_wgrad(
    a: Tensor, rows: Tensor | None, bs: Sequence[Tensor], offsets: Tensor, turned: bool
) -> Tensor:
    """For each expert, a^T b over its rows: (E, K, N). ``a`` is (M, K), or (T, K) from which
    ``rows`` (M,) are gathered; b is the concatenation of ``bs``, each (M, N_j), along columns.
    ``turned``: the result's memory layout is (E, N, K)."""
    a, b = a if rows is None else a[rows], torch.cat(tuple(bs), 1)
    if not a.shape[0]:
        return wgrad_result(a, bs, offsets, turned).zero_()
    if a.dtype != torch.float64:
        result = multiply(a.t(), b, offsets[1:])
    else:
        pairs = itertools.pairwise(offsets.tolist())
        result = torch.stack([a[i:j].t() @ b[i:j] for i, j in pairs])
    return result.mT.contiguous().mT if turned else result.contiguous()


def wgrad_result(a: Tensor, bs: Sequence[Tensor], offsets: Tensor, turned: bool) -> Tensor:
    """The uninitialized result of :func:`grouped_wgrad`."""
    e, k, n = offsets.shape[0] - 1, a.shape[1], sum(b.shape[1] for b in bs)
    return a.new_empty(e, n, k).mT if turned else a.new_empty(e, k, n)


def _route_fake(ids, experts, top_k):  # noqa: ARG001 (the op's signature)
    rows, perm, inverse = (ids.new_empty(ids.shape[0], dtype=torch.int32) for _ in range(3))
    return rows, perm, inverse, ids.new_empty(experts + 1, dtype=torch.int32)


ROUTE = opaque(schema_text(route, "rows perm inverse offsets"), route, _route_fake)
COMBINE = opaque(
    schema_text(combine),
    combine,
    lambda y, _weights, inverse, _offsets, top_k, dtype=None: y.new_empty(
        inverse.shape[0] // top_k, y.shape[1], dtype=dtype or y.dtype
    ),
)
WGRAD = opaque(
    schema_text(grouped_wgrad),
    grouped_wgrad,
    lambda a, _rows, bs, offsets, turned: wgrad_result(a, bs, offsets, turned),
)


@define(
    fake=lambda a, b, _, rows: a.new_empty((a if rows is None else rows).shape[0], b.shape[2]),
    counted_by_rewrite=True,
)
def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, rows: Tensor | None) -> Tensor:
    """Row i of the result (M, N) is row i of ``a`` (M, K), or row rows[i] of ``a`` (T, K), times B
    of its group: ``b`` (E, K, N) in any layout; ``offsets`` (E + 1,) and ``rows`` (M,) int32. Rows
    after the groups are arbitrary.
    """
    return grouped_product(a, b, offsets, rows, a.dtype)


def _group_rows_gradient(dy: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """Sums over the rows of each group, in order, as a product with ones, in rows of 16 bytes."""
    del ids
    m, n = dy.shape
    dy = F.pad(dy, (0, -n % 8)) if n % 8 else dy
    return WGRAD(dy.new_ones(m, 8), None, [dy], offsets, False)[:, 0, :n]


@define(gradient=_group_rows_gradient, wrt=("x",), counted_by_rewrite=True)
def group_rows(x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """x[ids], (M, N): for each row, its group's row of ``x`` (E, N). ``ids`` (M,) and ``offsets``
    (E + 1,) define the same groups, except for rows without an expert."""
    del offsets
    return x[ids]


class _Up(torch.autograd.Function):
    """Products of the rows of ``x`` (T, K) with ``weights``, each (E, K, parts N), as one (M, N)
    for each part of the columns. ``rows``, ``inverse`` and ``offsets`` are from :func:`route`;
    without ``rows``, x (M, K) is sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x, rows, inverse, offsets, top_k, parts, *weights) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, rows, inverse, offsets, *weights)
        ctx.top_k, ctx.parts = top_k, parts
        return tuple(grouped_mm(x, p, offsets, rows) for p in _parts(weights, parts))

    @staticmethod
    def backward(ctx: Any, *dz: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, inverse, offsets, *weights = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dweights = [
                grouped_mm(d, part.mT, offsets, None)
                for d, part in zip(dz, _parts(weights, ctx.parts), strict=True)
            ]
            summed = dweights[0] if len(dweights) == 1 else torch.add(*dweights)
            dx = summed if rows is None else COMBINE(summed, None, inverse, offsets, ctx.top_k)
        gradients: list[Tensor | None] = []
        for i, (weight, need) in enumerate(zip(weights, ctx.needs_input_grad[6:], strict=True)):
            parts = list(dz[i * ctx.parts : (i + 1) * ctx.parts])
            turned = weight.stride(1) == 1
            gradients.append(WGRAD(x, rows, parts, offsets, turned) if need else None)
        return dx, None, None, None, None, None, *gradients


def _parts(weights: Sequence[Tensor], parts: int) -> list[Tensor]:
    return [part for weight in weights for part in weight.chunk(parts, 2)]


class _Down(torch.autograd.Function):
    """The products of ``a`` (M, K) with ``weight`` (E, K, N), summed by token: (T, N) in ``dtype``,
    or a's, times ``w`` (T, top_k) if given. The other arguments are from :func:`route`."""

    @staticmethod
    def forward(ctx: Any, a, w, rows, perm, inverse, offsets, weight, top_k, dtype=None) -> Tensor:
        ctx.save_for_backward(a, w, rows, perm, inverse, offsets, weight)
        return COMBINE(grouped_mm(a, weight, offsets, None), w, inverse, offsets, top_k, dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        a, w, rows, perm, inverse, offsets, weight = ctx.saved_tensors
        dout = dout.to(a.dtype)
        wide = torch.promote_types(a.dtype, torch.float32)
        scale = None if w is None else w.reshape(-1)[perm].to(wide)[:, None]
        da = dw = dweight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            q = grouped_mm(dout, weight.mT, offsets, rows).to(wide)
            da = (q if scale is None else q * scale).to(a.dtype)
            if w is not None and ctx.needs_input_grad[1]:
                dots = (q * a.to(wide)).sum(-1)[inverse]
                dots = torch.where(inverse < offsets[-1], dots, 0.0)
                dw = dots.view(w.shape).to(w.dtype)
        if ctx.needs_input_grad[6]:
            weighted = a if scale is None else (a.to(wide) * scale).to(a.dtype)
            turned = weight.stride(1) != 1
            dweight = WGRAD(dout, rows, [weighted], offsets, turned).mT
        return da, dw, None, None, None, None, dweight, None, None


@compose(
    "experts_up(Tensor x, Tensor? rows, Tensor? inverse, Tensor offsets, Tensor[] weights, "
    "int top_k, int parts) -> Tensor[]",
    name="experts",
)
def experts_up(x, rows, inverse, offsets, weights, top_k, parts):
    """See :class:`_Up`."""
    return list(_Up.apply(x, rows, inverse, offsets, top_k, parts, *weights))


experts_down = compose(
    "experts_down(Tensor a, Tensor? w, Tensor rows, Tensor perm, Tensor inverse, Tensor offsets, "
    "Tensor weight, int top_k, ScalarType? dtype=None) -> Tensor",
    name="experts",
)(_Down.apply)
