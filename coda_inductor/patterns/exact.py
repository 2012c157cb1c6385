# SPDX-License-Identifier: Apache-2.0
"""A tensor of exact elements: any torch function, run on it, computes without rounding.

Elements are sympy expressions, so that what comes out is the function's formula for each place. An
operation is known by what it does to one element (``formulas``), or is moved about by torch itself,
as places in a list; torch decomposes what is neither. Numbers are exact: see ``formulas.number``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._pytree import tree_leaves, tree_map

from coda_inductor.errors import PatternError
from coda_inductor.patterns.formulas import FORMULAS, number
from coda_inductor.semantic.define import DEFINITIONS, isolated

aten = torch.ops.aten

#: Operations that only move elements: torch performs them on the places.
_MOVES = frozenset({
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "cat", "detach", "expand", "flip",
    "gather", "index_select", "lift_fresh", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unfold", "unsqueeze",
    "view",
})  # fmt: skip
_COPIES = ("_to_copy", "clone", "contiguous", "convert_element_type")
#: Overloads that write to their first argument -> the functional ones.
_NO_SIZES = (None, [], ())


class Exact(Tensor):
    """See the module docstring.

    Attributes:
        values: the elements of this tensor and of those that share its memory.
        at: int64, shaped like the tensor: where each of its elements is in ``values``.
    """

    values: list[Any]
    at: Tensor

    #: What operations do to elements, by their aten names.
    formulas: dict[str, Callable[..., Any]] = {
        **FORMULAS,
        "eq": lambda x, y: False if y in (sympy.oo, -sympy.oo) else sympy.Eq(x, y),
        "rsub": lambda x, y: y - x,
        "scalar_tensor": lambda x: x,
    }

    @staticmethod
    def __new__(cls, values: list[Any], at: Tensor, dtype: torch.dtype) -> Exact:
        made = torch.Tensor._make_wrapper_subclass(cls, at.shape, strides=at.stride(), dtype=dtype)
        made.values, made.at = values, at
        return made

    @classmethod
    def of(cls, items: Iterable[Any], shape: Sequence[int], dtype: torch.dtype) -> Exact:
        """A tensor of ``items``, row by row."""
        items = list(items)
        return cls(items, torch.arange(len(items)).reshape(tuple(shape)), dtype)

    @classmethod
    def symbols(cls, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Exact:
        """A tensor of symbols ``name_0``, ...: real ones, or pairs ``a + I b`` of real ones."""
        n = math.prod(shape)
        found = list(sympy.symbols(f"{name}_0:{n}", real=True)) if n else []
        if dtype.is_complex:
            turned = sympy.symbols(f"{name}i_0:{n}", real=True)
            found = [a + sympy.I * b for a, b in zip(found, turned, strict=True)]
        return cls.of(found, shape, dtype)

    @classmethod
    def exactly(cls, item: Any) -> Exact:
        """A plain tensor or a number as one of these."""
        if isinstance(item, cls):
            return item
        tensor = item.detach() if isinstance(item, Tensor) else torch.tensor(item)
        if not isinstance(item, Tensor):
            return cls.of([cls.number(item)], (), tensor.dtype)
        return cls.of(map(cls.number, tensor.flatten().tolist()), tensor.shape, tensor.dtype)

    @staticmethod
    def number(x: Any) -> Any:
        """A Python number as an element."""
        return number(x)

    @property
    def elements(self) -> list[Any]:
        """What it holds, row by row."""
        return [self.values[i] for i in self.at.flatten().tolist()]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.elements}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func in DEFINITIONS:
            with isolated():
                return DEFINITIONS[func].function(*args, **kwargs)
        if name.endswith("_") and (into := getattr(aten, name[:-1], None)) is not None:
            plain = getattr(into, func._overloadname)
            return cls._write(args[0], plain(*args, **kwargs))
        if name in _MOVES:
            return cls._move(func, args, kwargs)
        if name in _COPIES:
            dtype = kwargs.get("dtype") or (args[1] if name == "convert_element_type" else None)
            source = cls.exactly(args[0])
            return cls.of(source.elements, source.shape, dtype or source.dtype)
        if (special := cls.specials.get(name)) is not None:
            return special(cls, *args, **kwargs)
        if name in cls.formulas:
            return cls._elementwise(name, args, kwargs)
        found = func.decompose(*args, **kwargs)
        if found is NotImplemented:
            table = get_decompositions([func])
            if func not in table:
                raise PatternError(f"the prover has no formula for {func}")
            found = table[func](*args, **kwargs)
        return found

    @classmethod
    def _move(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Perform ``func`` on the places of all tensors that ``args`` hold, each in a list of its
        own or all in one; a plain tensor among them is an index."""
        several = isinstance(args[0], (list, tuple))
        moved = [cls.exactly(t) for t in (args[0] if several else args[:1])]
        if several:  # no view
            ends = itertools.accumulate((len(t.values) for t in moved), initial=0)
            first = [t.at + end for t, end in zip(moved, ends, strict=False)]
            values = [v for t in moved for v in t.values]
        else:
            first, values = moved[0].at, moved[0].values
        target = aten.reshape.default if func in (aten.view.default,) else func
        places = target(first, *args[1:], **kwargs)
        dtype = moved[0].dtype
        return tree_map(lambda at: cls(values, at, dtype) if isinstance(at, Tensor) else at, places)

    @classmethod
    def _write(cls, into: Exact, new: Any) -> Exact:
        spread = cls.exactly(new).expand(into.shape)
        for place, item in zip(into.at.flatten().tolist(), spread.elements, strict=True):
            into.values[place] = item
        return into

    @classmethod
    def _elementwise(cls, name: str, args: Any, kwargs: Any) -> Exact:
        alpha = kwargs.pop("alpha", 1)
        named = [kwargs[k] for k in ("min", "max", "approximate") if k in kwargs]
        tensors = [a for a in (*args, *named) if isinstance(a, Tensor)]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        size = math.prod(shape)
        columns = [
            cls.exactly(a).expand(shape).elements
            if isinstance(a, Tensor)
            else [cls.number(a)] * size
            for a in (*args, *named)
        ]
        if alpha != 1:
            columns[1] = [cls.number(alpha) * c for c in columns[1]]
        formula = cls.formulas[name]
        return cls.of((formula(*column) for column in zip(*columns, strict=True)), shape, _dtype(tensors))

    def over(self, dims: Any, keepdim: bool, fold: Callable[[list[Any]], Any]) -> Exact:
        """``fold`` of the elements along ``dims``, all where there are none."""
        rank = self.dim()
        given = [dims] if isinstance(dims, int) else dims
        along = list(range(rank)) if given in _NO_SIZES else sorted(d % rank for d in given)
        kept = [d for d in range(rank) if d not in along]
        rows = self.at.permute(*kept, *along).reshape(
            math.prod(self.shape[d] for d in kept), -1
        )
        items = [fold([self.values[i] for i in row]) for row in rows.tolist()]
        shape = [1 if d in along else self.shape[d] for d in range(rank) if keepdim or d in kept]
        return type(self).of(items, shape, self.dtype)

    #: Operations on more than one element, by their aten names.
    specials: dict[str, Callable[..., Any]] = {}


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtypes = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
    found = dtypes[0] if dtypes else tensors[0].dtype
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found


def total(items: Sequence[Any]) -> Any:
    """The sum of elements."""
    return sum(items[1:], items[0]) if items else 0


def _sum(cls: Any, x: Exact, dims: Any = None, keepdim: bool = False, **_: Any) -> Exact:
    return cls.exactly(x).over(dims, keepdim, total)


def _mean(cls: Any, x: Exact, dims: Any = None, keepdim: bool = False, **_: Any) -> Exact:
    return x.over(dims, keepdim, lambda items: total(items) / cls.number(len(items)))


def _var_mean(
    cls: Any, x: Exact, dims: Any = None, unbiased: Any = None, keepdim: bool = False, **how: Any
) -> tuple[Exact, Exact]:
    assert how.get("correction") == 0 or unbiased is False, "the biased variance"
    square = (x - _mean(cls, x, dims, True)).square()
    return _mean(cls, square, dims, keepdim), _mean(cls, x, dims, keepdim)


def _logsumexp(cls: Any, x: Exact, dims: Any, keepdim: bool = False) -> Exact:
    exp, log = cls.formulas["exp"], cls.formulas["log"]
    return x.over(dims, keepdim, lambda items: log(total([exp(i) for i in items])))


def _log_softmax(_cls: Any, x: Exact, dim: int, _half: bool = False) -> Tensor:
    """The logarithm of exp(x) / sum(exp(x)), as torch's documentation defines it."""
    exp = torch.exp(x)
    return torch.log(exp / exp.sum(dim, keepdim=True))


def _matmul(cls: Any, a: Any, b: Any) -> Exact:
    """(M, K) times (K, N)."""
    a, b = cls.exactly(a), cls.exactly(b)
    columns = [b.select(1, j).elements for j in range(b.shape[1])]
    rows = [a.select(0, i).elements for i in range(a.shape[0])]
    items = (total([x * y for x, y in zip(r, c, strict=True)]) for r in rows for c in columns)
    return cls.of(items, (a.shape[0], b.shape[1]), a.dtype)


def _nll_loss(
    _cls: Any, x: Tensor, target: Tensor, _weight: None, reduction: int, ignored: int
) -> tuple[Any, Any]:
    """Minus the target's element of each row of x (M, V); rows that are ignored give 0."""
    counts = target != ignored
    picked = x.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
    loss, n = torch.where(counts, -picked, 0.0), counts.sum().double()
    if reduction == 0:
        return loss, x.new_zeros(())
    return (loss.sum() if reduction == 2 else loss.sum() / n), n


def _view_as_complex(cls: Any, x: Exact) -> Exact:
    real, imaginary = (part.elements for part in x.unbind(-1))
    items = [a + sympy.I * b for a, b in zip(real, imaginary, strict=True)]
    return cls.of(items, x.shape[:-1], torch.complex128)


def _view_as_real(cls: Any, z: Exact) -> Exact:
    items = [part for item in z.elements for part in sympy.expand(item).as_real_imag()]
    return cls.of(items, (*z.shape, 2), torch.float64)


def _filled(value: Any) -> Callable[..., Exact]:
    def make(cls: Any, x: Exact, size: Any = None, *_: Any, **options: Any) -> Exact:
        shape = x.shape if size is None else size
        filled = [cls.number(value)] * math.prod(shape)
        return cls.of(filled, shape, options.get("dtype") or x.dtype)

    return make


Exact.specials = {
    "sum": _sum, "mean": _mean, "var": lambda *a, **k: _var_mean(*a, **k)[0], "var_mean": _var_mean, "logsumexp": _logsumexp, "_log_softmax": _log_softmax,
    "mm": _matmul, "nll_loss_forward": _nll_loss, "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real, "new_empty": _filled(0), "new_zeros": _filled(0),
    "zeros_like": _filled(0), "empty_like": _filled(0), "ones_like": _filled(1),
}  # fmt: skip
