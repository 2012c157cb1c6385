# SPDX-License-Identifier: Apache-2.0
"""Rotate queries and keys in the rows of their projection's result.

Before (y is M x H d, from the epilogue of a GEMM; cos and sin have w columns per position)::

    q = permute(view(y, [B, T, H, d]), [0, 2, 1, 3]);  z = rotate(q, cos, sin, distance)

After::

    even, odd = keep(cos, in rows like y), keep(sin, same, with its signs)        once for all
    z = permute(view(rotate_heads(y, cos, sin, even, odd, distance), [B, T, H, d]), [0, 2, 1, 3])

Why it is valid: views move no data, and a rotation stays within one head and one position. Why it
pays: a tile of whole heads has both columns of each pair, so an epilogue can rotate
(``fuse.heads``): queries and keys are written once, rotated. If no epilogue does, the rewrite is
undone, and the tables are not computed. The gradient does not change.

Refuses: inputs that no GEMM's epilogue computes, such as a norm over all heads at once; tables that
differ between heads; results whose readers rely on another layout (``torch.cat`` makes a rotation
of part of a head contiguous by heads; attention takes any layout); projections that are not fused.
"""

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import producer
from coda_inductor.graph.layout import relay
from coda_inductor.graph.nodes import arguments, aten, fake, is_cast, label, may_view, renames
from coda_inductor.graph.read import called, op_name
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same, same_strides
from coda_inductor.graph.splice import splice
from coda_inductor.graph.walk import base, chain, leaves, only_reader, readers
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.tables import KEEP
from coda_inductor.semantic.rotary import each_column, rotate, rotate_heads, turn

#: Views of any layout.
_VIEWS = ("unsqueeze", "expand", "permute")

#: A tensor to rotate: rows (..., H * d); the same as heads (..., H, d); and their permutation.
Layout = tuple[Node, Node, list[int]]
#: Tables, which all layers share, by their sources.
Tables = dict[Hashable, list[Node]]


def rotate_rows(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every rotation of the forward pass where it is valid. Only rotations
    that an epilogue absorbs are counted."""
    scope = Scope(graph)
    cache: Tables = {}
    for node in [n for n in graph.nodes if n.target is rotate and n in scope.forward]:
        layout = _layout(arguments(node)["x"], scope, record)
        why = layout if isinstance(layout, Refusal) else _rewrite(node, layout, cache)
        if why is not None:
            record.refuse("rotary", node, why)
        scope.refresh()


def _layout(x: Node, scope: Scope, record: Record) -> Layout | Refusal:
    heads, order = x, [*range(fake(x).dim())]
    if heads.target is aten.permute.default:
        order, heads = arguments(heads)["dims"], heads.all_input_nodes[0]
    shape = fake(heads).shape[-2:]
    rows = base(heads, lambda n: renames(n) and not same(fake(n).shape[-1], shape.numel()))
    symbolic = any(isinstance(n, torch.SymInt) for n in shape)
    views = op_name(heads) == "view" and len(order) > 2 and order[-1] == len(order) - 1
    gemm = producer(rows)
    if gemm is None or symbolic or not views or not same(fake(rows).shape[-1], shape.numel()):
        return refuse("no-gemm", "no GEMM computes rows of the heads that it reads")
    if (why := record.sites.refusal(gemm)) is not None:
        return why.excused().within(f"{label(gemm)} is not fused: {{}}")
    if not record.sites.absorbs(gemm, rows, scope):
        return refuse("no-gemm", f"an op between it and {label(gemm)} cannot be in an epilogue")
    return rows, heads, list(order)


def _rewrite(node: Node, layout: Layout, cache: Tables) -> Refusal | None:
    rows, heads, order = layout
    kwargs, reader, size = arguments(node), only_reader(node), fake(heads).shape[-1]
    cos, sin, *form = (kwargs[n] for n in ("cos", "sin", "distance", "paired", "inverse"))
    root = reader if reader is not None and is_cast(reader) else node  # what an epilogue stores
    after = torch.empty_like(fake(heads), memory_format=torch.contiguous_format).permute(order)
    if not same_strides(after, fake(root)) and not _any_layout(root):
        return refuse("no-gemm", "its readers rely on another layout of its result")
    head_dim = order.index(len(order) - 2) - len(order)
    for table in (cos, sin):
        if fake(table).dim() >= -head_dim and not same(fake(table).shape[head_dim], 1):
            return refuse("no-gemm", f"{label(table)} differs between heads")
        if fake(table).dtype == torch.float64 != fake(rows).dtype:
            return refuse("float64-mixed", f"{label(table)} is float64, but what it rotates is not")
    key = (_spelling(cos), _spelling(sin), *order, *form, size, str(fake(heads).shape[:-2]))
    like = max(_spelling(cos)[0], _spelling(sin)[0])  # for its meta: all layers share the tables
    tables = splice(node, _as_rows, (cos, sin, order), like=like)
    put, free = Put(node), Put(like, node)
    # As arguments of the view that makes the heads. Tables that read a symbolic size from the view
    # itself would depend on the GEMM before it.
    lead = arguments(heads)["size"][: fake(heads).dim() - 2]
    lead = [put.sizes(heads)[i] if isinstance(n, int) else n for i, n in enumerate(lead)]
    if key not in cache:
        cache[key] = []
        for table in splice(node, _even_odd, (*tables, size, *form), like=like):
            full = free(aten.expand.default, table, [*lead, 1, size])
            cache[key].append(free(KEEP, free.reshape(full, [-1, size])))
    if not same(fake(rows).shape[:-1], fake(heads).shape[:-2]):
        rows = put.reshape(rows, [*lead, fake(rows).shape[-1]])
    args = (rows, *tables, *cache[key], *form, kwargs["joined"], fake(root).dtype)
    rotated = Put(node, pattern=("rotary", node.name))(rotate_heads, *args)
    new = put(aten.view.default, rotated, [*lead, *fake(heads).shape[-2:]])
    if order != sorted(order):
        new = put(aten.permute.default, new, order)
    why = relay(root, new)
    prune([root])  # if nobody reads it
    return why


def _any_layout(node: Node) -> bool:
    for user in readers(node, lambda n: op_name(n) in _VIEWS)[1]:
        name, call = str(user.target), called(user, "clone")
        copies = call is not None and call["memory_format"] == torch.contiguous_format
        if not copies and "scaled_dot_product" not in name and "flex_attention" not in name:
            return False
    return not leaves(node)


def _spelling(table: Node) -> tuple[Node | str, ...]:
    *views, root = chain(table, may_view)
    moves = (v for v in views if not renames(v))
    texts = (f"{v.target} {arguments(v) | {'input': fake(v.all_input_nodes[0])}}" for v in moves)
    return root, str(fake(table).shape), *texts


def _as_rows(cos: Tensor, sin: Tensor, order: list[int]) -> tuple[Tensor, ...]:
    """Tables that broadcast against rotated heads, changed to broadcast against heads in rows."""
    back = [order.index(i) for i in range(len(order))]
    return tuple(t[(None,) * (len(order) - t.dim())].permute(back) for t in (cos, sin))


def _even_odd(
    cos: Tensor, sin: Tensor, size: int, distance: int, paired: bool, inverse: bool
) -> tuple[Tensor, ...]:
    """(factors of x, factors of its swapped columns) for a kernel, each (..., size).

    A column that is not rotated is swapped with itself: x / 2 + x / 2 is x, while x * 1 + x * 0
    would turn infinity into NaN.
    """
    cos, sin = (each_column(table, distance, paired) for table in (cos, sin))
    odd = -turn(sin, distance) if inverse else turn(torch.ones_like(sin), distance) * sin
    rest = (0, size - cos.shape[-1])
    return tuple(torch.nn.functional.pad(table, rest, value=0.5) for table in (cos, odd))
