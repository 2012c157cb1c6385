# SPDX-License-Identifier: Apache-2.0
"""Heads that are cut out of a packed projection: where they stand in its rows, and what else reads
these.

Before (y is M x H d: the heads of queries, keys and values, one beside the other or by turns)::

    q = permute(view(slice(y, ...), [B, T, h, d]), [0, 2, 1, 3]);  zq = rotate(q, cos, sin, ...)
    k, zk likewise;  v = another part of y

After::

    z = rotate_heads(y, cos, sin, even, odd, ..., which, heads)
    zq = permute(slice(view(z, [B, T, H, d]), ...), [0, 2, 1, 3]);  zk likewise
    v = the same part of z

Why it is valid: ``which`` is 1 under the columns of ``heads``, and all other columns are copied, so
that who reads those reads the same; nothing but the rotations reads the columns that are rotated.
Where no epilogue rotates, ``unpack`` undoes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.compat import storage
from coda_inductor.graph.edit import Put, settle
from coda_inductor.graph.nodes import VIEWS, aten, fake, may_view, row_major
from coda_inductor.graph.sizes import same
from coda_inductor.graph.splice import splice
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.views import refresh
from coda_inductor.semantic.rotary import rotate_definition, rotate_heads


@dataclass(frozen=True)
class Part:
    """Of ``rows`` (..., N): ``count`` heads of ``size`` columns, every ``step``th from ``first``
    on, as (*lead, count, size), turned by ``order``. ``lead`` holds sizes as views are given them.
    """

    rows: Node
    lead: tuple[Any, ...]
    size: int
    first: int
    step: int
    count: int
    order: list[int]

    @property
    def heads(self) -> range:
        return range(self.first, self.first + self.count * self.step, self.step)

    @property
    def columns(self) -> set[int]:
        return {head * self.size + i for head in self.heads for i in range(self.size)}


def part_of(x: Node) -> Part | None:
    """Where ``x`` (a permutation of *lead, heads, columns of a head) stands in the rows that it is
    a view of; None where it does not, or is all of them."""
    through = [x]
    while may_view(through[-1]):
        through.append(through[-1].args[0])
    for name in reversed(through[:-1]):
        refresh(name)  # what it was a view of may have been replaced
    view, whole = fake(x), fake(through[-1])
    if not isinstance(whole, Tensor) or whole.dim() < 2 or not isinstance(view, Tensor):
        return None
    width, size = whole.shape[-1], view.shape[-1]
    start = view.storage_offset() - whole.storage_offset()
    if not all(isinstance(n, int) for n in (width, size, start)) or storage(view) != storage(whole):
        return None
    if view.dtype != whole.dtype or view.is_neg() or not same(view.stride(-1), 1):
        return None
    across = [i for i in range(view.dim() - 1) if _within(view, i, width)]
    lead = [i for i in range(view.dim() - 1) if i not in across]
    if len(across) != 1 or not 0 < size < width or not _are_rows(view, lead, whole):
        return None
    (head,) = across
    count, step = view.shape[head], view.stride(head)
    if any(n % size for n in (width, start, step)) or start + (count - 1) * step + size > width:
        return None
    sizes = _sizes(through, [view.shape[i] for i in lead])
    if sizes is None or count * size == width or whole.dim() not in (2, len(lead) + 1):
        return None
    places = [*lead, head, view.dim() - 1]
    order = [places.index(i) for i in range(view.dim())]
    return Part(through[-1], sizes, size, start // size, step // size, count, order)


def _within(view: Tensor, dim: int, width: int) -> bool:
    """Is ``dim`` one of heads, and not of rows of so many columns?"""
    known = isinstance(view.stride(dim), int) and isinstance(view.shape[dim], int)
    return known and 0 < view.stride(dim) < width


def _are_rows(view: Tensor, lead: list[int], whole: Tensor) -> bool:
    """Are the dimensions ``lead`` all rows of ``whole``, in order?"""
    expected: Any = whole.shape[-1]
    for i in reversed(lead):
        if not same(view.shape[i], 1) and not same(view.stride(i), expected):
            return False
        expected = expected * view.shape[i]
    return row_major(whole) and same(expected, whole.numel())


def _sizes(through: list[Node], lead: list[Any]) -> tuple[Any, ...] | None:
    """``lead``, as a view is given it that one of these starts with: to ask a result of the GEMM
    for its sizes would let tables depend on it."""
    if all(isinstance(size, int) for size in lead):
        return tuple(lead)
    for node in reversed(through):
        if node.target in VIEWS and same(fake(node).shape[: len(lead)], lead):
            given = tuple(node.args[1][: len(lead)])
            return given if -1 not in given else None
    return None


def _others_read(part: Part, rotation: Node) -> bool:
    """Does anything but ``rotation`` read the columns of ``part``?"""
    width, views = fake(part.rows).shape[-1], _views(part.rows)
    for view in views:
        if view is not part.rows:
            refresh(view)
        read = any(user is not rotation and user not in views for user in view.users)
        if read and part.columns & _columns(fake(view), fake(part.rows), width):
            return True
    return False


def _views(rows: Node) -> list[Node]:
    """``rows`` and all that looks into its memory, each after what it is a view of."""
    found = [rows]
    for name in found:
        found += [u for u in name.users if u.op != "output" and may_view(u) and u not in found]
    return found


def _columns(view: Any, rows: Tensor, width: int) -> set[int]:
    """The columns of ``rows`` that ``view`` shows; all where that is not known."""
    everything = set(range(width))
    if not isinstance(view, Tensor) or view.dtype != rows.dtype:
        return everything
    start = view.storage_offset() - rows.storage_offset()
    dims = [i for i in range(view.dim()) if not same(view.shape[i], 1)]
    if not isinstance(start, int) or not all(_plain(view, i, width) for i in dims):
        return everything
    dims = [i for i in dims if not same(view.stride(i) % width, 0)]
    across = [(view.shape[i], view.stride(i)) for i in dims]
    places = itertools.product(*(range(0, size * stride, stride) for size, stride in across))
    found = {start + sum(place) for place in places}
    return found if max(found, default=0) < width else everything


def _plain(view: Tensor, dim: int, width: int) -> bool:
    """Does ``dim`` go either along rows or across their columns, for certain?"""
    if same(view.stride(dim) % width, 0):
        return True
    size: Any = view.shape[dim]
    stride: Any = view.stride(dim)
    return isinstance(size, int) and isinstance(stride, int) and 0 < size * stride <= width


def _regular(heads: set[int], all_heads: int) -> tuple[int, int, int] | None:
    """(period, first, last): ``heads`` are those h of all with first <= h % period < last; None if
    there are no such numbers."""
    for period in (n for n in range(1, all_heads + 1) if all_heads % n == 0):
        places = {head % period for head in heads}
        first, last = min(places), max(places) + 1
        if len(places) == last - first and len(heads) == len(places) * (all_heads // period):
            return period, first, last
    return None


def _ones(
    width: int, size: int, period: int, first: int, last: int, device: torch.device
) -> Tensor:
    place = torch.arange(width, device=device) // size % period
    return ((place >= first) & (place < last)).to(torch.float32)


def inseparable(part: Part, rotation: Node, form: tuple[Any, ...]) -> Refusal | None:
    """Why ``rotation`` of ``part`` cannot be made with the rows, or None. ``form``: its tables as
    kernels read them, if they were made, then its distance, whether it joins, and its dtype."""
    rows, heads = part.rows, set(part.heads)
    if form[-1] != fake(rows).dtype:
        return refuse("heads-packed", f"its result is {form[-1]}, its rows are not")
    if rows.target is rotate_heads:
        if heads & set(rows.args[9]) or not rows.args[9]:
            return refuse("heads-packed", "what it rotates is rotated already")
        if form != tuple(rows.args[3:8]):
            return refuse("heads-packed", "columns beside it are rotated in another way")
        heads |= set(rows.args[9])
    if _regular(heads, fake(rows).shape[-1] // part.size) is None:
        return refuse("heads-packed", "its heads do not stand at regular places")
    if _others_read(part, rotation):
        return refuse("heads-packed", "something else reads its columns as they are")
    return None


def look_at(part: Part) -> Node:
    """``part`` as a view of its rows, (*lead, count, size)."""
    graph, rows = part.rows.graph, part.rows
    with graph.inserting_before(rows.next):
        return cut_out(Put(graph, like=rows), part, rows, part.lead)


def rotate_part(put: Put, part: Part, form: tuple[Any, ...], masks: dict[Hashable, Node]) -> Node:
    """Rotate the heads of ``part`` where its rows are made, and let all readers of these read that:
    what is rotated of them already is made there too. Returns the rotated rows (*lead, N).

    ``form``: arguments of the op; ``masks``: those that were made for others.
    """
    rows, width = part.rows, fake(part.rows).shape[-1]
    if rows.target is rotate_heads:
        heads = sorted({*rows.args[9], *part.heads})
        rows.args = (*rows.args[:8], _mask(rows.args[3], rows, part.size, heads, masks), heads)
        return rows
    heads, users = sorted(part.heads), list(rows.users)
    flat = fake(rows).dim() == 2 != len(part.lead) + 1
    given = put.reshape(rows, [*part.lead, width]) if flat else rows
    mask = _mask(form[2], rows, part.size, heads, masks)
    rotated = put(rotate_heads, given, *form, mask, heads)
    after = put.reshape(rotated, [-1, width]) if flat else rotated
    for user in users:
        user.replace_input_with(rows, after)
    settle([after])
    return rotated


def _mask(
    table: Node, rows: Node, size: int, heads: list[int], masks: dict[Hashable, Node]
) -> Node:
    """(N,) in float32: 1 under the columns of ``heads`` of ``rows`` (..., N), else 0. Made beside
    ``table``: like that it belongs to no layer."""
    width = fake(rows).shape[-1]
    regular = _regular(set(heads), width // size)
    assert regular is not None, "asked before"
    key = (width, size, *regular)
    if key not in masks:
        args = (width, size, *regular, fake(rows).device)
        masks[key] = splice(table.graph, table, _ones, args, like=table)
    return masks[key]


def cut_out(put: Put, part: Part, rows: Node, lead: Sequence[Any]) -> Node:
    """``part`` of ``rows`` (*lead, N), as (*lead, count, size)."""
    all_heads, last = fake(rows).shape[-1] // part.size, part.heads[-1] + 1
    heads = put(aten.view.default, rows, [*lead, all_heads, part.size])
    heads.meta[_ROTATED] = True
    return put(aten.slice.Tensor, heads, -2, part.first, last, part.step)


#: Meta of the view of rows whose parts are rotated.
_ROTATED = "coda_rotated"


def unpack(graph: Graph, node: Node) -> None:
    """Undo ``node``, a rotation of some heads of rows: who reads those rotates them, and who reads
    others reads the rows."""
    rows, cos, sin, _, _, *form = node.args[:8]
    for name in list(node.users):
        name.replace_input_with(node, rows)
        if not name.meta.get(_ROTATED):
            continue
        for part in [user for user in name.users if user.users]:
            readers = list(part.users)
            args = (part, cos, sin, *form)
            turned = splice(graph, min(readers), _rotated, args, like=node)
            for reader in readers:
                reader.replace_input_with(part, turned)


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, distance: int, joined: bool, dtype: torch.dtype
) -> Tensor:
    return rotate_definition(
        x, cos, sin, distance, paired=False, inverse=False, joined=joined, out_dtype=dtype
    )
