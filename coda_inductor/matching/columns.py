# SPDX-License-Identifier: Apache-2.0
"""Columns that are selected from a tensor and joined again, in their many spellings.

``x[..., :h]``, ``x.chunk(2, -1)[0]``, ``x.split(h, -1)[0]`` and
``x.view(..., 2, h)[..., 0, :]`` are all ``columns(x, 0, h, 1)``; ``x[..., ::2]`` and
``x.unflatten(-1, (-1, 2)).unbind(-1)[0]`` are both ``columns(x, 0, None, 2)``. Of the ways to join,
``stack(parts, -1)`` with its last two dimensions merged is ``interleave``, and ``stack(parts, -2)``
is a ``cat``. The nodes between are skipped, and listed in ``Canon.through``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from coda_inductor.graph.read import Call, read
from coda_inductor.matching.canon import Canon, value


def item(source: Any, index: Any) -> Canon | None:
    """``source[index]``: columns of a tensor, or None."""
    if isinstance(index, int):
        return _part(source, index)
    places = _places(index, source) if isinstance(index, tuple) else None
    if not places:
        return None
    taken = [i - len(places) for i, place in enumerate(places) if place != slice(None)] or [-1]
    last = places[-1]
    if taken == [-1] and isinstance(last, slice):
        return _columns(source, last.start or 0, last.stop, 1 if last.step is None else last.step)
    one = places[taken[0]]
    return _unfolded(source, one, taken[0]) if len(taken) == 1 and isinstance(one, int) else None


def joined(call: Call) -> Canon | None:
    """``torch.cat`` and ``torch.stack``: the dimension, counted from the last, and the tensors.
    Empty parts of a ``cat`` are left out."""
    tensors, dim = call["tensors"], _from_end(call["dim"], call.node)
    if dim is None or not isinstance(tensors, (tuple, list)):
        return None
    if call.op == "cat":
        tensors = [part for part in tensors if not _empty(part, dim)]
    return Canon(call.op, (dim, *tensors))


def merged(call: Call) -> Canon | None:
    """A stack, or the two parts of complex numbers, with the last two dimensions merged; None for
    any other ``flatten``, ``view`` or ``reshape``."""
    source = read(call["input"])
    if source is None or not _merges(call):
        return None
    if source.op == "view_as_real":
        return Canon("complex_as_columns", (source["input"],), (source.node,))
    stacked = joined(source) if source.op == "stack" else None
    if stacked is None or stacked.args[0] not in (-1, -2):
        return None
    dim, *tensors = stacked.args
    if dim == -1:
        return Canon("interleave", tuple(tensors), (source.node,))
    return Canon("cat", (-1, *tensors), (source.node,))


def complex_columns(call: Call) -> Canon | None:
    """``view_as_complex`` of columns as pairs."""
    source, width = _unfolds(call["input"])
    if width == 2:
        return Canon("columns_as_complex", (source,), (call["input"],))
    return Canon("view_as_complex", (call["input"],))


def _part(source: Any, index: int) -> Canon | None:
    """Result ``index`` of ``chunk``, ``split`` or ``unbind``."""
    call = read(source)
    if call is None or index < 0 or call.op not in ("chunk", "split", "unbind"):
        return None
    if call.op == "unbind":
        return _unfolded(call["input"], index, call["dim"], (source,))
    known = value(call["input"])
    width = known.shape[-1] if isinstance(known, torch.Tensor) and known.dim() else None
    if not isinstance(width, int) or _from_end(call["dim"], call["input"]) != -1:
        return None
    if call.op == "chunk":
        parts = call["chunks"]
        size = -(-width // parts) if isinstance(parts, int) else None
    else:
        size = call["split_size"]
    if isinstance(size, (list, tuple)) and all(isinstance(n, int) for n in size):
        start, stop = sum(size[:index]), sum(size[: index + 1])
    elif isinstance(size, int) and size:
        start, stop = index * size, (index + 1) * size
    else:
        return None
    return _columns(call["input"], start, stop, 1, (source,))


def _columns(
    source: Any, start: Any, stop: Any, step: Any, through: tuple[Node, ...] = ()
) -> Canon:
    """Columns ``start`` to ``stop``. ``stop`` is None if ``start`` is not 0 and they go on to the
    end."""
    known = value(source)
    width = known.shape[-1] if isinstance(known, torch.Tensor) and known.dim() else None
    if isinstance(width, int):
        start = start + width if isinstance(start, int) and start < 0 else start
        stop = stop + width if isinstance(stop, int) and stop < 0 else stop
        later = isinstance(start, int) and start > 0
        stop = None if later and isinstance(stop, int) and stop >= width else stop
    return Canon("columns", (source, start, stop, step), through)


def _unfolded(view: Any, index: int, dim: Any, through: tuple[Node, ...] = ()) -> Canon | None:
    """``index`` of dimension ``dim`` of ``view``, which shows columns as a matrix."""
    dim, (source, inner) = _from_end(dim, view), _unfolds(view)
    if inner is None or dim not in (-1, -2):
        return None
    recorded = value(view)
    if recorded is None and (dim == -2 or index < 0):
        return None  # an idiom's own
    index = index + recorded.shape[dim] if index < 0 else index
    through = (*through, view)
    if dim == -1:
        return Canon("columns", (source, index, None, inner), through)
    return _columns(source, index * inner, (index + 1) * inner, 1, through)


def _unfolds(view: Any) -> tuple[Any, int | None]:
    """What ``view`` is a view of, and the size of its last dimension, if the last two come from one
    dimension; else None."""
    call = read(view)
    if call is None or call.op not in ("view", "unflatten"):
        return None, None
    before, after = value(call["input"]), value(view)
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return call["input"], after.shape[-1] if _unfolding(before, after) else None
    # A node of an idiom has no recorded value.
    sizes: Any = call["sizes"] if call.get("dim") == -1 else ()
    inner = sizes[1] if len(sizes) == 2 else None
    return call["input"], inner if isinstance(inner, int) and inner > 0 else None


def _merges(call: Call) -> bool:
    """Does a view merge the last two dimensions?"""
    before, after = value(call["input"]), value(call.node)
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before.dtype == after.dtype and _unfolding(after, before)
    return (call.get("start_dim"), call.get("end_dim")) == (-2, -1)


def _unfolding(folded: torch.Tensor, unfolded: torch.Tensor) -> bool:
    """Is ``unfolded`` the same as ``folded``, with its columns as a matrix of static size?"""
    if unfolded.dim() != folded.dim() + 1 or not folded.dim():
        return False
    (*rows, width), (*lead, n, k) = folded.shape, unfolded.shape
    if not all(isinstance(size, int) for size in (width, n, k)) or n * k != width:
        return False
    return all(statically_known_true(a == b) for a, b in zip(rows, lead, strict=True))


def _empty(part: Any, dim: int) -> bool:
    known = value(part)
    if not isinstance(known, torch.Tensor) or known.dim() < -dim:
        return False
    return isinstance(known.shape[dim], int) and known.shape[dim] == 0


def _places(index: tuple[Any, ...], source: Any) -> list[Any] | None:
    """What ``index`` selects in each dimension of ``source``; if its rank is unknown, only from the
    ellipsis on. None if the result is not a view, or has a new dimension."""
    if not all(isinstance(i, (int, slice, type(Ellipsis))) for i in index):
        return None
    if any(isinstance(i, bool) for i in index):
        return None  # a mask
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    before, after = list(index[:at]), list(index[at + 1 :])
    known = value(source)
    if not isinstance(known, torch.Tensor):
        return after if not before and after else None
    return before + [slice(None)] * (known.dim() - len(before) - len(after)) + after


def _from_end(dim: Any, tensor: Any) -> int | None:
    """``dim`` counted from the last dimension of ``tensor``; None if its rank is unknown."""
    if not isinstance(dim, int) or dim < 0:
        return dim if isinstance(dim, int) else None
    known = value(tensor)
    return dim - known.dim() if isinstance(known, torch.Tensor) else None
