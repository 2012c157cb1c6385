# SPDX-License-Identifier: Apache-2.0
"""Columns that are taken out of a tensor and put together again, in their many spellings.

``x[..., :h]``, ``x.chunk(2, -1)[0]``, ``x.split(h, -1)[0]``, ``x.narrow(-1, 0, h)`` and
``x.view(..., 2, h)[..., 0, :]`` are all ``columns(x, 0, h, 1)``; ``x[..., ::2]`` and
``x.unflatten(-1, (-1, 2)).unbind(-1)[0]`` are both ``columns(x, 0, None, 2)``. Put together,
``stack(parts, -1)`` with its last two dimensions merged is ``interleave``, and ``stack(parts, -2)``
is a ``cat``; pairs of columns as a matrix that is transposed and merged again are ``apart``. The
nodes between are looked through, and named (``Canon.through``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from coda_inductor.matching.canon import Canon, named, target_name, value

_VIEWS = ("view", "reshape", "unflatten")
_MERGES = ("view", "reshape", "flatten")


def item(node: Node) -> Canon | None:
    """``source[index]``: columns of a tensor, or None."""
    source, index = node.args
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


def select(node: Node) -> Canon | None:
    """``select(x, dim, index)``."""
    given = named(node, "input", "dim", "index")
    if given is None or not isinstance(given["index"], int):
        return None
    return _unfolded(given["input"], given["index"], given["dim"])


def narrow(node: Node) -> Canon | None:
    """``narrow(x, dim, start, length)``."""
    given = named(node, "input", "dim", "start", "length")
    if given is None or _from_end(given["dim"], given["input"]) != -1:
        return None
    start, length = given["start"], given["length"]
    if not (isinstance(start, int) and isinstance(length, int)) or start < 0:
        return None
    return _columns(given["input"], start, start + length, 1)


def joined(node: Node) -> Canon | None:
    """``torch.cat`` and ``torch.stack``: the dimension, counted from the last, and the tensors. A
    part of a ``cat`` that has nothing in that dimension is none."""
    found = _parts(node)
    if found is None:
        return None
    dim, tensors = found
    if target_name(node) == "cat":
        tensors = [part for part in tensors if not _empty(part, dim)]
    return Canon(target_name(node), (dim, *tensors))


def merged(node: Node) -> Canon | None:
    """The last two dimensions made one, of a stack, of complex numbers' two parts, or of pairs of
    columns that were transposed; None for any other ``flatten``, ``view`` or ``reshape``."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not _merges(node, source):
        return None
    name = target_name(source)
    if name == "view_as_real":
        return Canon("complex_as_columns", tuple(source.args), (source,))
    if name == "transpose":
        return _apart(source)
    if name != "stack" or (found := _parts(source)) is None:
        return None
    dim, tensors = found
    if dim == -1:
        return Canon("interleave", tuple(tensors), (source,))
    return Canon("cat", (-1, *tensors), (source,)) if dim == -2 else None


def _apart(turned: Node) -> Canon | None:
    """All first columns of pairs, then all second ones: ``turned`` has them as two rows."""
    given = named(turned, "input", "dim0", "dim1")
    if given is None or _unfolds(pairs := given["input"]) != 2:
        return None
    if {_from_end(given["dim0"], pairs), _from_end(given["dim1"], pairs)} != {-1, -2}:
        return None
    return Canon("apart", (pairs.args[0],), (turned, pairs))


def complex_columns(node: Node) -> Canon | None:
    """``view_as_complex`` of columns as pairs."""
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and _unfolds(source) == 2:
        return Canon("columns_as_complex", (source.args[0],), (source,))
    return Canon("view_as_complex", tuple(node.args))


def _part(source: Any, index: int) -> Canon | None:
    """``chunk``, ``split`` or ``unbind``, of which ``index`` is taken."""
    name = target_name(source) if isinstance(source, Node) else ""
    how = _DIVIDE.get(name)
    return None if how is None or index < 0 else how(source, index)


def _unbind(node: Node, index: int) -> Canon | None:
    given = named(node, "input", "dim", dim=0)
    return None if given is None else _unfolded(given["input"], index, given["dim"], (node,))


def _chunk(node: Node, index: int) -> Canon | None:
    given = named(node, "input", "chunks", "dim", dim=0)
    width = _width(given, "chunks")
    if given is None or width is None:
        return None
    size = -(-width // given["chunks"])
    return _columns(given["input"], index * size, (index + 1) * size, 1, (node,))


def _split(node: Node, index: int) -> Canon | None:
    sizes = "split_size" if "split_size" in node.kwargs else "split_size_or_sections"
    given = named(node, "input", sizes, "dim", dim=0)
    if given is None or _width(given) is None:
        return None
    size = given[sizes]
    if isinstance(size, int):
        return _columns(given["input"], index * size, (index + 1) * size, 1, (node,))
    if not isinstance(size, (list, tuple)) or not all(isinstance(n, int) for n in size):
        return None
    start = sum(size[:index])
    return _columns(given["input"], start, start + size[index], 1, (node,))


def _tensor_split(node: Node, index: int) -> Canon | None:
    """Into so many parts, of which the first may be one wider than the others, or at places."""
    given = named(node, "input", "indices_or_sections", "dim", dim=0)
    width = _width(given)
    if given is None or width is None:
        return None
    at = given["indices_or_sections"]
    if isinstance(at, int):
        size, wider = divmod(width, at)
        places = [i * size + min(i, wider) for i in range(at + 1)]
    elif isinstance(at, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in at):
        places = [0, *at, width]
    else:
        return None
    return _columns(given["input"], places[index], places[index + 1], 1, (node,))


_DIVIDE: dict[str, Callable[[Node, int], Canon | None]] = {
    "chunk": _chunk, "split": _split, "unbind": _unbind, "tensor_split": _tensor_split,
}  # fmt: skip


def _width(given: dict[str, Any] | None, count: str = "") -> int | None:
    """How many columns ``given["input"]`` has, if that is a number, and it is they that are
    divided, into a number of parts."""
    if given is None or _from_end(given["dim"], given["input"]) != -1:
        return None
    recorded = value(given["input"])
    width = recorded.shape[-1] if isinstance(recorded, torch.Tensor) else None
    known = isinstance(width, int) and (not count or isinstance(given[count], int))
    return width if known else None


def _columns(
    source: Any, start: Any, stop: Any, step: Any, through: tuple[Node, ...] = ()
) -> Canon:
    """Columns ``start`` to ``stop``, which is None where they go on to the end from a later one
    than the first."""
    known = value(source)
    width = known.shape[-1] if isinstance(known, torch.Tensor) and known.dim() else None
    if isinstance(width, int):
        start = start + width if isinstance(start, int) and start < 0 else start
        stop = stop + width if isinstance(stop, int) and stop < 0 else stop
        later = isinstance(start, int) and start > 0
        stop = None if later and isinstance(stop, int) and stop >= width else stop
    return Canon("columns", (source, start, stop, step), through)


def _unfolded(view: Any, index: int, dim: Any, through: tuple[Node, ...] = ()) -> Canon | None:
    """``index`` of dimension ``dim`` of ``view``, in which columns stand as a matrix."""
    dim, inner = _from_end(dim, view), _unfolds(view)
    if inner is None or dim not in (-1, -2):
        return None
    recorded = value(view)
    if recorded is None and (dim == -2 or index < 0):
        return None  # an idiom's own
    index = index + recorded.shape[dim] if index < 0 else index
    source, through = view.args[0], (*through, view)
    if dim == -1:
        return Canon("columns", (source, index, None, inner), through)
    return _columns(source, index * inner, (index + 1) * inner, 1, through)


def _unfolds(view: Any) -> int | None:
    """The size of the last dimension of ``view``, if the last two were one; None if not."""
    if not isinstance(view, Node) or target_name(view) not in _VIEWS or not view.args:
        return None
    before, after = value(view.args[0]), value(view)
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return after.shape[-1] if _unfolding(before, after) else None
    # An idiom's own, which is recorded nowhere.
    literal = target_name(view) == "unflatten" and view.args[1] == -1
    inner = view.args[2][1] if literal and len(view.args[2]) == 2 else None
    return inner if isinstance(inner, int) and inner > 0 else None


def _merges(node: Node, source: Node) -> bool:
    """Does ``node`` make one of the last two dimensions of ``source``?"""
    if target_name(node) not in _MERGES:
        return False
    before, after = value(source), value(node)
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before.dtype == after.dtype and _unfolding(after, before)
    return target_name(node) == "flatten" and tuple(node.args[1:]) == (-2,)


def _unfolding(folded: torch.Tensor, unfolded: torch.Tensor) -> bool:
    """Is ``unfolded`` what ``folded`` is, its columns as a matrix of known size?"""
    if unfolded.dim() != folded.dim() + 1 or not folded.dim():
        return False
    (*rows, width), (*lead, n, k) = folded.shape, unfolded.shape
    if not all(isinstance(size, int) for size in (width, n, k)) or n * k != width:
        return False
    return all(statically_known_true(a == b) for a, b in zip(rows, lead, strict=True))


def _parts(node: Node) -> tuple[int, list[Any]] | None:
    """The dimension of a ``cat`` or ``stack``, counted from the last, and its tensors."""
    given = named(node, "tensors", "dim", dim=0)
    if given is None or not isinstance(given["tensors"], (tuple, list)):
        return None
    dim = _from_end(given["dim"], node)
    return None if dim is None else (dim, list(given["tensors"]))


def _empty(part: Any, dim: int) -> bool:
    known = value(part)
    if not isinstance(known, torch.Tensor) or known.dim() < -dim:
        return False
    return isinstance(known.shape[dim], int) and known.shape[dim] == 0


def _places(index: tuple[Any, ...], source: Any) -> list[Any] | None:
    """What ``index`` takes of each dimension of ``source``; of those from its ellipsis on, where
    more is not known. None where it is no view, or makes a dimension."""
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
    """``dim`` counted from the last dimension of ``tensor``; None if that is not known."""
    if not isinstance(dim, int) or dim < 0:
        return dim if isinstance(dim, int) else None
    known = value(tensor)
    return dim - known.dim() if isinstance(known, torch.Tensor) else None
