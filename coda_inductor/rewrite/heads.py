# SPDX-License-Identifier: Apache-2.0
"""Rotations of queries and keys are told of the rows that their projection makes.

Before (y is M x H d, made in the epilogue of a GEMM; cos and sin hold w columns a position)::

    q = permute(view(y, [B, T, H, d]), [0, 2, 1, 3]);  z = rotate(q, cos, sin, distance)

After::

    even, odd = keep(cos, one row a row of y), keep(sin, so, with its signs)      once for all
    z = permute(view(rotate_heads(y, cos, sin, even, odd, distance), [B, T, H, d]), [0, 2, 1, 3])

Why it is valid: views move nothing, and a rotation stays within one head and one position. What is
not rotated is the sum of its halves. Complex turns are both tables in one, and a rotation back is
one forward by other sines. Why it pays: a tile of whole heads has both columns of each pair, so
that an epilogue can rotate (``fuse.heads``): queries and keys are written once, rotated. Where none
does, it is undone as if nothing had happened, and nobody makes the tables.

The gradient stays where it is: attention makes dq and dk, and its rotation back is one elementwise
kernel with whatever scales the rows of dz.

Refuses: what no GEMM's epilogue makes, as a norm over all heads at once; tables that differ between
heads; results that a reader counts on being laid out otherwise (``torch.cat`` lays a rotation of
part of a head out head by head; attention takes any layout, and so does who puts columns apart);
projections that policy leaves alone.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.fuse.grow import reaches
from coda_inductor.graph.edit import Put, insert, prune
from coda_inductor.graph.gemms import producer
from coda_inductor.graph.nodes import (
    VIEWS,
    aten,
    base,
    fake,
    is_cast,
    leaves,
    place,
    renames,
    sources,
)
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import laid_out_alike, same
from coda_inductor.graph.splice import splice
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.norm.forward import NORMS
from coda_inductor.rewrite.tables import KEEP
from coda_inductor.semantic.rotary import (
    each_column,
    exchange,
    rotate,
    rotate_heads,
    rotate_pairs,
    turn,
)

#: Views of any layout.
_MOVES = (aten.unsqueeze.default, aten.expand.default, aten.permute.default)


@dataclass
class Place:
    """What is rotated: ``rows`` (..., H * d), as ``heads`` (..., H, d), turned by
    ``order`` (None: not turned)."""

    rows: Node
    heads: Node
    order: list[int] | None


#: Tables, which belong to no layer, by what they are made of.
Made = dict[Hashable, tuple[Node, Node]]


def rotate_rows(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every rotation of the forward pass where it is valid. Counts nothing: a
    rotation that an epilogue absorbs counts."""
    scope = Scope(graph)
    made: Made = {}
    for node in [n for n in graph.nodes if n.target in (rotate, rotate_pairs)]:
        if node not in scope.forward:
            continue
        if (why := _rotate_rows(graph, node, scope, record, made)) is not None:
            record.refuse("rotary", place(node), why)
        scope.refresh(graph)


def _rotate_rows(
    graph: Graph,
    node: Node,
    scope: Scope,
    record: Record,
    made: Made,
) -> Refusal | None:
    """Apply the rewrite to ``node``, or say why not."""
    found = place_of(node.args[0], scope, record)
    if isinstance(found, Refusal):
        return found
    node = _of_tables(graph, node, made)
    root = with_cast(node)
    why = _unreadable(node, found) or unlike(root, found)
    if why is None:
        _rewrite(graph, node, root, found, made)
    return why


def place_of(x: Node, scope: Scope, record: Record) -> Place | Refusal:
    """Where the rows of ``x``, which is rotated, are made."""
    heads, order = x, None
    if heads.target is aten.permute.default:
        heads, order = heads.args[0], list(heads.args[1])
    rank = fake(heads).dim()
    if heads.target not in VIEWS or rank < 3 or (order and order[-1] != rank - 1):
        return refuse("heads-no-gemm", "it does not read the heads of a matrix's rows")
    count, size = fake(heads).shape[-2:]
    if any(isinstance(n, torch.SymInt) for n in (count, size)):
        return refuse("symbolic-features", "the number or the size of heads is symbolic")
    rows = heads
    while renames(rows) and not same(fake(rows).shape[-1], count * size):
        rows = rows.args[0]
    if not same(fake(rows).shape[-1], count * size):
        return refuse("heads-no-gemm", "no GEMM makes what it reads")
    return _unmade(rows, scope, record) or Place(rows, heads, order)


def _unmade(rows: Node, scope: Scope, record: Record) -> Refusal | None:
    """Why no GEMM's epilogue makes ``rows``, or None."""
    gemm = producer(rows)
    if gemm is None:
        return _normed(rows) or refuse("heads-no-gemm", "no GEMM makes what it reads")
    if (why := record.policy.legal(gemm)) is not None:
        return why.excused().within(f"its GEMM {gemm.name} is not fused: {{}}")
    if not reaches(gemm, rows, scope):
        text = f"something between it and its GEMM {gemm.name} is in no epilogue"
        return refuse("heads-no-gemm", text)
    return None


def _normed(rows: Node) -> Refusal | None:
    """The reason where a norm of whole rows (OLMo 2's, of all heads at once) makes ``rows`` of the
    result of a GEMM; None elsewhere. That norm is applied after the GEMM, whatever rotates."""
    for node in sources(rows):
        if node.target is operator.getitem and node.args[0].target in NORMS:
            norm = node.args[0]
            if (gemm := producer(norm.args[0])) is None:
                return None
            text = (
                f"the {NORMS[norm.target]} behind its GEMM {gemm.name} is of all "
                f"{fake(norm.args[0]).shape[-1]} columns, not of a head: its scale is known when "
                "all tiles of a row are done"
            )
            return refuse("heads-normed", text)
    return None


def _of_tables(graph: Graph, node: Node, made: Made) -> Node:
    """The rotation ``node`` by tables, if it is one by complex numbers."""
    if node.target is rotate:
        return node
    x, turns, inverse, dtype = node.args
    key = (base(turns), str(fake(turns).shape))
    if key not in made:
        made[key] = splice(graph, node, _real, (turns,), like=base(turns))
    cos, sin = made[key]
    with graph.inserting_before(node):
        new = insert(graph, rotate, (x, cos, sin, 1, True, inverse, False, dtype), like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _real(turns: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, one for each pair."""
    cos, sin = torch.view_as_real(turns).unbind(-1)
    return cos, sin


def with_cast(node: Node) -> Node:
    """``node``, or the cast that alone reads it: an epilogue stores what that makes."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_cast(users[0]) else node


def _unreadable(node: Node, found: Place) -> Refusal | None:
    """Why an epilogue cannot read the tables of ``node``, or None."""
    for table in node.args[1:3]:
        if not same(as_rows(fake(table), fake(found.heads), found.order).shape[-2], 1):
            return refuse("heads-tables", f"{table.name} differs between heads")
        if fake(table).dtype == torch.float64 != fake(found.rows).dtype:
            return refuse("float64-mixed", f"{table.name} is float64, what it rotates is not")
    return None


def unlike(root: Node, found: Place) -> Refusal | None:
    """Why the result must not be laid out as what is rotated, or None."""
    after = torch.empty_like(fake(found.heads), memory_format=torch.contiguous_format)
    after = after if found.order is None else after.permute(found.order)
    if not laid_out_alike(after, fake(root)) and not _any_layout(root):
        return refuse("heads-layout", "its readers count on another layout of its result")
    return None


def _any_layout(node: Node) -> bool:
    """Does it matter to no reader how ``node`` is laid out?"""
    if leaves(node):
        return False
    todo = [node]
    while todo:
        for user in todo.pop().users:
            name = str(user.target)
            if user.target in _MOVES or _splits_columns(user):
                todo.append(user)
            elif user.target is aten.clone.default:
                if user.kwargs.get("memory_format") is not torch.contiguous_format:
                    return False
            elif "scaled_dot_product" not in name and "flex_attention" not in name:
                return False
    return True


def _splits_columns(view: Node) -> bool:
    """Is it a view of the columns as a matrix? Columns stand beside each other in every layout."""
    if view.target not in VIEWS:
        return False
    before, after = fake(view.args[0]).shape, fake(view).shape
    return len(after) > len(before) and same(after[: len(before) - 1], before[:-1])


def as_rows(table: Tensor, heads: Tensor, order: list[int] | None) -> Tensor:
    """``table``, which broadcasts against what is rotated, as it does against ``heads``."""
    for _ in range(heads.dim() - table.dim()):
        table = table.unsqueeze(0)
    if order is None:
        return table
    return table.permute([order.index(i) for i in range(len(order))])


def _rewrite(graph: Graph, node: Node, root: Node, found: Place, made: Made) -> None:
    cos, sin, *form = node.args[1:6]
    key, rows, distance = _key(node, found), found.rows, form[0]
    source = max(base(cos), base(sin))  # its meta: tables belong to no layer
    given = (cos, sin, found.heads, found.order, *form)
    cos, sin = splice(graph, node, _both_as_rows, given, like=source)
    put, plain = Put(graph, like=node, pattern=("rotary", node.name)), Put(graph, like=node)
    with graph.inserting_before(node):
        lead = lead_of(plain, found.heads)
        if key not in made:
            flat = [_of_each_row(Put(graph, like=source), table, lead) for table in (cos, sin)]
            given = (*flat, distance, fake(found.heads).shape[-1])
            made[key] = splice(graph, node, _tables, given, like=source)
        if not same(fake(rows).shape[:-1], fake(found.heads).shape[:-2]):
            rows = plain.reshape(rows, [*lead, fake(rows).shape[-1]])
        last = (distance, node.args[6], fake(root).dtype)
        new = put(rotate_heads, rows, cos, sin, *made[key], *last)
        new = plain(aten.view.default, new, [*lead, *fake(found.heads).shape[-2:]])
        if found.order is not None:
            new = plain(aten.permute.default, new, found.order)
    root.replace_all_uses_with(new)
    prune([root, found.heads])


def lead_of(put: Put, heads: Node) -> list[Any]:
    """The leading sizes of ``heads`` as the view that makes it has them: tables that ask the view
    for a symbolic size would depend on the GEMM behind it."""
    view = heads if heads.target in VIEWS else heads.args[0]
    known = view.args[1][: fake(heads).dim() - 2]
    return [put.sizes(heads)[i] if isinstance(n, int) else n for i, n in enumerate(known)]


def _of_each_row(put: Put, table: Node, lead: list[Any]) -> Node:
    """``table`` (..., 1, w), as often as there are rows: (rows, w)."""
    width = fake(table).shape[-1]
    return put.reshape(put(aten.expand.default, table, [*lead, 1, width]), [-1, width])


def _key(node: Node, found: Place) -> Hashable:
    """Equal for rotations that read equal tables."""
    cos, sin, *form = node.args[1:6]
    shapes = fake(cos).shape, fake(sin).shape, fake(found.heads).shape[:-2]
    order = () if found.order is None else tuple(found.order)
    size = fake(found.heads).shape[-1]
    return (base(cos), base(sin), order, *form, size, *map(str, shapes))


def _both_as_rows(
    cos: Tensor,
    sin: Tensor,
    heads: Tensor,
    order: list[int] | None,
    distance: int,
    paired: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Tables of a rotation forward: turn(x * sin), which goes back, is turn(x) * exchange(sin)."""
    cos, sin = (each_column(as_rows(t, heads, order), distance, paired) for t in (cos, sin))
    return cos, -exchange(sin, distance) if inverse else sin


def _tables(cos: Tensor, sin: Tensor, distance: int, size: int) -> tuple[Tensor, Tensor]:
    """What a kernel multiplies x and its swapped columns with, each (rows, size).

    A column that is not rotated is its own swapped one, and x / 2 + x / 2 is x, where x * 1 + x * 0
    would make NaN of an infinity.
    """
    rest = (0, size - cos.shape[-1])
    odd = turn(torch.ones_like(sin), distance) * sin
    even, odd = (torch.nn.functional.pad(table, rest, value=0.5) for table in (cos, odd))
    return KEEP(even), KEEP(odd)
