# SPDX-License-Identifier: Apache-2.0
"""Columns that are selected from a tensor and joined again, in their many spellings.

``x[..., :h]``, ``x.chunk(2, -1)[0]``, ``x.split(h, -1)[0]`` and
``x.view(..., 2, h)[..., 0, :]`` are all ``columns(x, 0, h, 1)``; ``x[..., ::2]`` and
``x.unflatten(-1, (-1, 2)).unbind(-1)[0]`` are both ``columns(x, 0, None, 2)``. Of the ways to join,
``stack(parts, -1)`` with its last two dimensions merged is ``interleave``, and ``stack(parts, -2)``
is a ``cat``. The nodes between are skipped, and listed in ``Call.through``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from coda_inductor.compat import storage
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.read import Call, called, kind, read
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import chain


def item(call: Call) -> Call | None:
    """``source[index]`` as columns of ``source``, or of the tensor that it views; else None.
    Recorded values decide, in any spelling; an idiom has none and must spell ``x[..., a:b:c]``."""
    source, part = call["input"], fake(call.node)
    if part is None:
        index = call.get("index")
        if not isinstance(index, tuple) or index[:-1] != (Ellipsis,):
            return None
        cut = index[-1]
        if not isinstance(cut, slice):
            return None
        start, step = cut.start or 0, cut.step or 1
        return call.to("columns", input=source, start=start, stop=cut.stop, step=step)
    sources = chain(source, lambda n: kind(n) in ("names", "parts"))
    for i, above in enumerate(sources if isinstance(part, Tensor) else ()):
        whole = fake(above)
        if isinstance(whole, Tensor) and (span := _span(part, whole)) is not None:
            return call.to("columns", *sources[:i], input=above, **span)
    return None


def _span(part: Tensor, whole: Tensor) -> dict[str, Any] | None:
    """(start, stop, step) of the columns of ``whole`` that ``part`` is a view of, else None. Stop
    is None if they end with ``whole`` but do not begin with it."""
    strided = part.layout == whole.layout == torch.strided
    if not strided or part.dim() != whole.dim() or not part.dim() or part.dtype != whole.dtype:
        return None
    try:
        shared = storage(part) == storage(whole)
    except NotImplementedError:  # vmap's tensors have none
        return None
    if not shared or not same(part.shape[:-1], whole.shape[:-1]):
        return None
    first: Any = part.storage_offset() - whole.storage_offset()
    unit, n, width = whole.stride(-1), part.shape[-1], whole.shape[-1]
    numbers = all(isinstance(x, int) for x in (unit, first, n, width, part.stride(-1)))
    rows = zip(part.shape[:-1], part.stride(), whole.stride(), strict=False)
    same_rows = all(same(size, 1) or same(a, b) for size, a, b in rows)
    if not numbers or not same_rows or not unit or not n:
        return None
    (start, odd), (step, rest) = divmod(first, unit), divmod(part.stride(-1), unit)
    if odd or rest or not step:
        return None
    last = start + step * (n - 1)
    ends = last + step >= width and (start or step > 1)
    return {"start": start, "stop": None if ends else last + 1, "step": step}


def join(call: Call) -> Call | None:
    """``torch.cat`` or ``torch.stack`` as tensors and a dimension, counted from the last; or None.
    Empty parts of a ``cat`` are left out."""
    tensors, dim = call["tensors"], _from_end(call["dim"], call.node)
    if dim is None or not isinstance(tensors, (tuple, list)):
        return None
    if call.op == "cat":
        tensors = [part for part in tensors if not _empty(part, dim)]
    return call.to(call.op, dim=dim, **{str(i): part for i, part in enumerate(tensors)})


def merge(call: Call) -> Call | None:
    """A stack, or the two parts of complex numbers, with the last two dimensions merged; None for
    any other ``flatten``, ``view`` or ``reshape``."""
    source = read(call["input"])
    literal = (call.get("start_dim"), call.get("end_dim")) == (-2, -1)
    if source is None or not _unfolds(call.node, source.node, literal):
        return None
    if source.op == "view_as_real":
        return call.to("complex_as_columns", source.node, input=source["input"])
    stacked = join(source) if source.op == "stack" else None
    if stacked is None or stacked["dim"] not in (-1, -2):
        return None
    tensors = {name: part for name, part in stacked.args.items() if name != "dim"}
    if stacked["dim"] == -1:
        return call.to("interleave", source.node, **tensors)
    return call.to("cat", source.node, dim=-1, **tensors)


def complex_columns(call: Call) -> Call:
    """``view_as_complex`` as a call of columns in pairs."""
    view = called(call["input"], "view", "unflatten")
    if view is not None:
        literal = (view.get("dim"), view.get("sizes")) == (-1, (-1, 2))
        if _unfolds(view["input"], view.node, literal):
            return call.to("columns_as_complex", view.node, input=view["input"])
    return call.to("view_as_complex", input=call["input"])


def _unfolds(folded: Any, unfolded: Node, literal: bool) -> bool:
    """Is ``unfolded`` equal to ``folded`` with its columns as a matrix of static size? For the
    nodes of an idiom, which have no recorded values, ``literal`` is the answer."""
    before, after = fake(folded), fake(unfolded)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return literal
    if before.dtype != after.dtype or not before.dim() or after.dim() != before.dim() + 1:
        return False
    static = all(isinstance(size, int) for size in (before.shape[-1], *after.shape[-2:]))
    return static and same(before.shape[:-1], after.shape[:-2])


def _empty(part: Any, dim: int) -> bool:
    value = fake(part)
    return isinstance(value, Tensor) and value.dim() >= -dim and same(value.shape[dim], 0)


def _from_end(dim: Any, tensor: Any) -> int | None:
    """``dim`` counted from the last dimension of ``tensor``; None if its rank is unknown."""
    if not isinstance(dim, int) or dim < 0:
        return dim if isinstance(dim, int) else None
    value = fake(tensor)
    return dim - value.dim() if isinstance(value, Tensor) else None
