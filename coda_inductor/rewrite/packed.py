# SPDX-License-Identifier: Apache-2.0
"""A packed projection whose halves meet again (Phi-3's ``gate_up_proj``) becomes two projections by
the halves of its weight, which the fuser then pairs in one tile (rule R6).

Before::

    gu = x @ W.T;  g, u = gu.chunk(2, -1);  a = silu(g) * u              W (2F, K)
    dgu = cat([dg, du], -1);  dx = dgu @ W;  dW = dgu.T @ x

After::

    g = x @ W[:F].T;  u = x @ W[F:].T;  a = silu(g) * u
    dx = dg @ W[:F] + du @ W[F:];  dW = cat([dg.T @ x, du.T @ x])

Why it is valid: a product's columns are those of its right factor, one by one, and a product over a
concatenated K is the sum of two. The halves of a weight are views of it: nothing is copied. The
gradient of the weight is put together by a copy, which ``Policy.split_loses`` charges.

Leaves alone: products that anything else reads, or more than two parts of; halves that do not meet
in elementwise work, or that leave the graph (their strides and common memory are seen); weights
that are not K-major (their halves cannot be paired). A gradient that something else reads stays one
tensor, and its GEMMs stay as they were.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune, settle
from coda_inductor.graph.gemms import GEMMS, bias_of, gemm_inputs, plain_bias, scales_of
from coda_inductor.graph.nodes import (
    VIEWS,
    aten,
    base,
    elementwise,
    fake,
    is_transpose,
    leaves,
    place,
    readers,
    renames,
)
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.program.dtypes import FLOATS
from coda_inductor.record import Record
from coda_inductor.semantic.fp8 import scaled_mm

_FAR = 16  # how many elementwise ops may lie between a half and where it meets the other


@dataclass
class _Packed:
    """``gemm`` (M, 2F), the nodes that are its halves, and its weight (2F, K)."""

    gemm: Node
    halves: tuple[list[Node], list[Node]]
    weight: Node


def split_packed(graph: Graph, record: Record) -> None:
    """Apply the rewrite wherever it is valid and pays. Counts nothing: that a pair shares a tile
    does."""
    scope, policy = Scope(graph), record.policy
    for gemm in [n for n in graph.nodes if n.target in GEMMS and n in scope.forward]:
        found = _packed(gemm)
        if found is None:
            continue
        cats = _gradients(found, scope)
        why = policy.legal(gemm) or policy.split_loses(gemm, bool(cats))
        if why is not None:
            record.refuse("packed projection", place(gemm), why)
            continue
        weights = _split(graph, found)
        for cat in cats:
            _split_gradient(graph, cat, found.weight, weights)


def _packed(gemm: Node) -> _Packed | None:
    if bias_of(gemm) is not None and not plain_bias(gemm):
        return None
    if fake(gemm).dtype not in FLOATS:  # no epilogue waits for the halves: no reason to warn
        return None
    weight = gemm_inputs(gemm)[1]
    width = fake(gemm).shape[-1]
    if not is_transpose(weight) or not isinstance(width, int) or width % 2:
        return None
    halves: tuple[list[Node], list[Node]] = ([], [])
    _, users = readers(gemm, lambda u: renames(u) and _keeps_width(u, width))
    for user in users:
        if (parts := _parts(user, width)) is None:
            return None
        halves[0].extend(parts[0])
        halves[1].extend(parts[1])
    if not all(halves) or not _meet(*halves):
        return None
    if any(leaves(node) or _sizes(node) is None for half in halves for node in half):
        return None
    return _Packed(gemm, halves, weight.args[0])


def _keeps_width(view: Node, width: int) -> bool:
    shape = fake(view).shape
    return len(shape) > 0 and same(shape[-1], width)


def _parts(user: Node, width: int) -> tuple[list[Node], list[Node]] | None:
    """(lower, upper) halves of the last dimension that ``user`` takes; None if it does anything
    else."""
    source = user.args[0] if user.args else None
    if not isinstance(fake(source), torch.Tensor):  # a nested graph that is called, for one
        return None
    dim = user.args[2] if len(user.args) > 2 else user.kwargs.get("dim", 0)
    last = fake(source).dim() - 1
    if user.target in (aten.split.Tensor, aten.split_with_sizes.default):
        sizes = user.args[1] if isinstance(user.args[1], list) else [user.args[1]] * 2
        if dim not in (-1, last) or list(sizes) != [width // 2] * 2:
            return None
        items = [u for u in user.users if u.target is operator.getitem]
        lower, upper = ([u for u in items if u.args[1] == i] for i in (0, 1))
        return lower, upper
    if user.target is aten.slice.Tensor:
        _, dim, start, end = (*user.args, *(0, 0, None)[len(user.args) - 1 :])[:4]
        step = user.args[4] if len(user.args) > 4 else 1
        if dim not in (-1, last) or step != 1:
            return None
        if (start or 0) == 0 and end == width // 2:
            return [user], []
        if start == width // 2 and isinstance(end, int) and end >= width:
            return [], [user]
    return None


def _meet(lower: list[Node], upper: list[Node]) -> bool:
    """Does some elementwise op depend on both?"""
    return bool(_elementwise_readers(lower) & _elementwise_readers(upper))


def _elementwise_readers(nodes: list[Node]) -> set[Node]:
    found: set[Node] = set()
    frontier = set(nodes)
    for _ in range(_FAR):
        frontier = {u for n in frontier for u in n.users if u not in found and elementwise(u)}
        found |= frontier
    return found


def _split(graph: Graph, found: _Packed) -> tuple[Node, Node]:
    """Put the two products in the place of one; returns the halves of the weight, each (F, K)."""
    gemm, f = found.gemm, fake(found.gemm).shape[-1] // 2
    put = Put(graph, like=gemm)
    weights = []
    with graph.inserting_before(gemm):
        for i, half in enumerate(found.halves):
            weight = put(aten.slice.Tensor, found.weight, 0, i * f, (i + 1) * f)
            turned = put(aten.permute.default, weight, [1, 0])
            weights.append(weight)
            _replace(graph, half, _product(put, gemm, turned, i * f, (i + 1) * f))
    settle(weights)
    return weights[0], weights[1]


def _product(put: Put, gemm: Node, weight: Node, start: int, end: int) -> Node:
    """Columns ``start`` to ``end`` of ``gemm``, whose weight's columns are ``weight``."""
    a, bias = gemm_inputs(gemm)[0], bias_of(gemm)
    if bias is not None:
        bias = put(aten.slice.Tensor, bias, 0, start, end)
    if gemm.target is scaled_mm:
        rows, columns = scales_of(gemm)
        if fake(columns).dim():
            columns = put(aten.slice.Tensor, columns, 1, start, end)
        extra = [] if bias is None else [bias]
        return put(scaled_mm, a, weight, rows, columns, *gemm.args[4:7], *extra)
    if bias is None:
        return put(aten.mm.default, a, weight)
    return put(aten.addmm.default, bias, a, weight)


def _replace(graph: Graph, half: list[Node], product: Node) -> None:
    for node in half:
        new = product
        if not same(fake(node).shape, fake(product).shape):
            with graph.inserting_before(node):
                sizes = _sizes(node)
                assert sizes is not None, "asked before"
                new = Put(graph, like=node)(aten.view.default, product, sizes)
        node.replace_all_uses_with(new)
        prune([node])


def _sizes(half: Node) -> list[Any] | None:
    """The sizes of ``half`` as a view's arguments, none read from what will be gone; None if they
    are not known."""
    shape = fake(half).shape
    symbolic = sum(isinstance(s, torch.SymInt) for s in shape)
    if not symbolic or (symbolic == 1 and not any(isinstance(s, int) and s == 0 for s in shape)):
        return [-1 if isinstance(s, torch.SymInt) else s for s in shape]
    source = half.args[0] if half.target is aten.slice.Tensor else half.args[0].args[0]
    return [*source.args[1][:-1], shape[-1]] if source.target in VIEWS else None


def _gradients(found: _Packed, scope: Scope) -> list[Node]:
    """The ``cat`` nodes that are the product's gradient: read by nothing but the GEMMs that make
    the gradients of the weight and of the input, and the bias's sum."""
    weight, wanted = found.weight, fake(found.gemm).shape
    cats: dict[Node, None] = {}
    for name in readers(weight, is_transpose)[0]:
        for user in name.users:
            dgrad = user.target is aten.mm.default and user.args[1] is name
            if dgrad and user not in scope.forward and same(fake(user.args[0]).shape, wanted):
                cats[base(user.args[0])] = None
    return [cat for cat in cats if _joins_halves(cat, wanted[-1]) and _is_only_read(cat, weight)]


def _joins_halves(node: Node, width: int) -> bool:
    """Does ``node`` put two tensors together, each half as wide as ``width``?"""
    if node.target is not aten.cat.default:
        return False
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    halves = [fake(part).shape[-1] * 2 for part in parts]
    return dim in (-1, fake(node).dim() - 1) and halves == [width] * 2


def _is_only_read(cat: Node, weight: Node) -> bool:
    return all(_reads_gradient(user, weight) for user in readers(cat)[1])


def _reads_gradient(user: Node, weight: Node) -> bool:
    if user.target is aten.mm.default:  # the input's gradient
        names, _ = readers(weight, is_transpose)
        return user.args[1] in names and same(fake(user.args[1]).shape, fake(weight).shape)
    if is_transpose(user):  # the weight's
        return all(u.target is aten.mm.default and u.args[0] is user for u in user.users)
    return user.target is aten.sum.dim_IntList and list(user.args[1]) == [0]


def _split_gradient(graph: Graph, cat: Node, weight: Node, halves: tuple[Node, Node]) -> None:
    """Let what reads the gradient read its two parts, as in the module docstring."""
    f = fake(weight).shape[0] // 2
    made: list[Node] = []
    for user in readers(cat)[1]:
        put = Put(graph, like=user)
        for reader in list(user.users) if is_transpose(user) else [user]:
            with graph.inserting_before(reader):
                parts = [put(aten.reshape.default, p, [-1, f]) for p in cat.args[0]]
                if is_transpose(user):
                    x = reader.args[1]
                    turned = [put(aten.permute.default, p, [1, 0]) for p in parts]
                    new = put(aten.cat.default, [put(aten.mm.default, t, x) for t in turned], 0)
                elif user.target is aten.mm.default:
                    pairs = zip(parts, halves, strict=True)
                    new = put(aten.add.Tensor, *[put(aten.mm.default, *pair) for pair in pairs])
                else:
                    sums = [put(aten.sum.dim_IntList, p, *user.args[1:]) for p in parts]
                    new = put(aten.cat.default, sums, -1)
            reader.replace_all_uses_with(new)
            made.append(new)
            prune([reader])
    settle(made)
