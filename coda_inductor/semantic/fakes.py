# SPDX-License-Identifier: Apache-2.0
"""Results of ops for fake tensors, computed once, because the layers of a model repeat.

Torch takes 0.1 to 5 ms to run an op on fake tensors. The sizes, strides, dtype and device of a
result depend only on the same properties of the arguments, so that a second call creates its
result from the first call's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

#: The most results that are kept.
_MOST = 8192
_RESULTS: dict[Hashable, Any] = {}
_LITERALS = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Shape(tuple[Any, ...]):
    """The sizes, strides, dtype and device of a tensor, and its offset in its memory."""

    __slots__ = ()


class _UncertainError(Exception):
    """A result may depend on more than the compared properties, for example on a symbolic size."""


def once(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` for fake tensors. All its results must be new memory."""
    try:
        key = (function, _part(args))
    except _UncertainError:
        return function(*args)
    known = _RESULTS.get(key)  # another thread may clear them at any time
    if known is not None:
        return _copy(known)
    result = function(*args)
    with contextlib.suppress(_UncertainError):
        if len(_RESULTS) >= _MOST:
            _RESULTS.clear()
        _RESULTS[key] = _new(result)
    return result


def _part(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _shape(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    if value is None or isinstance(value, _LITERALS):
        return type(value), value
    raise _UncertainError


def _shape(x: Tensor) -> _Shape:
    """The properties of ``x``. Known values are refused, because an op may compute with them."""
    sizes, strides, offset = tuple(x.shape), x.stride(), x.storage_offset()
    fixed = type(sum((*sizes, *strides, offset))) is int
    if not fixed or x.layout != torch.strided or getattr(x, "constant", None) is not None:
        raise _UncertainError
    return _Shape((sizes, strides, offset, x.dtype, x.device, x.requires_grad))


def _new(result: Any) -> Any:
    """``result`` as properties for new tensors. They have no gradient."""
    if isinstance(result, (list, tuple)):
        return tuple(map(_new, result))
    if not isinstance(result, Tensor) or result.storage_offset() != 0 or result.requires_grad:
        raise _UncertainError
    return _shape(result)


def _copy(value: Any) -> Any:
    if not isinstance(value, _Shape):
        return tuple(map(_copy, value))
    sizes, strides, _, dtype, device, _ = value
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
