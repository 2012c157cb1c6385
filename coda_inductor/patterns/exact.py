# SPDX-License-Identifier: Apache-2.0
"""A tensor of exact elements, on which any torch function computes without rounding.

Elements are sympy expressions, so the result is the function's formula for each element. An
operation has a formula for one element (``formulas``), or only moves elements (torch then moves
their indices in a list), or is in ``specials``. Torch decomposes composite operations.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_inductor.compat import make_wrapper_subclass, tree_map
from coda_inductor.errors import PatternError
from coda_inductor.graph.read import KINDS
from coda_inductor.patterns.formulas import FORMULAS, number
from coda_inductor.semantic.define import DEFINITIONS, isolated

aten = torch.ops.aten

#: Operations that only move elements: torch performs them on the indices.
_MOVES = {op for op, kind in KINDS.items() if kind not in ("casts", "copies")}
_MOVES |= {"_unsafe_view", "as_strided", "gather", "reshape", "rev"}


class Exact(Tensor):
    """A tensor of exact elements, see the module docstring.

    Attributes:
        cells: the elements of this tensor and of all tensors that share its memory.
        at: the index in ``cells`` of each element, int64, shaped like the tensor.
        formulas: the formulas of elementwise operations, by aten name.
        specials: operations on more than one element; called with the class first.
    """

    cells: list[Any]
    at: Tensor
    formulas: ClassVar[dict[str, Callable[..., Any]]] = {
        **FORMULAS,
        "eq": lambda x, y: False if y in (sympy.oo, -sympy.oo) else sympy.Eq(x, y),
        "masked_fill": lambda x, mask, new: new if mask else x,
        "rsub": lambda x, y: y - x,
    }
    specials: ClassVar[dict[str, Callable[..., Any]]] = {}

    @staticmethod
    def __new__(cls, cells: list[Any], at: Tensor, dtype: torch.dtype) -> Any:
        tensor: Any = make_wrapper_subclass(cls, at.shape, strides=at.stride(), dtype=dtype)
        tensor.cells, tensor.at = cells, at
        return tensor

    @classmethod
    def of(cls, elements: Iterable[Any], shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A tensor with ``elements``, row by row."""
        cells = list(elements)
        return cls(cells, torch.arange(len(cells)).reshape(tuple(shape)), dtype)

    @classmethod
    def symbols(cls, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Any:
        """A tensor of symbols ``name_0``, ...: real, or for a complex dtype pairs ``a + I b``."""
        n = math.prod(shape)
        elements = [sympy.Symbol(f"{name}_{i}", real=True) for i in range(n)]
        if dtype.is_complex:
            elements = [z + sympy.I * sympy.Symbol(f"{z}_i", real=True) for z in elements]
        return cls.of(elements, shape, dtype)

    @classmethod
    def exactly(cls, item: Any) -> Any:
        """A plain tensor, or a number, as an exact tensor."""
        if isinstance(item, cls):
            return item
        if not isinstance(item, Tensor):
            return cls.of([cls.number(item)], (), torch.tensor(item).dtype)
        return cls.of(map(cls.number, item.flatten().tolist()), item.shape, item.dtype)

    @staticmethod
    def number(x: Any) -> Any:
        """A Python number as an exact element."""
        return number(x)

    @property
    def elements(self) -> list[Any]:
        """The tensor's elements, row by row."""
        return [self.cells[i] for i in self.at.flatten().tolist()]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.elements}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, _, overload = func.name().partition("::")[2].partition(".")
        if func in DEFINITIONS:
            with isolated():
                return DEFINITIONS[func].function(*args, **kwargs)
        if name in _MOVES:
            return cls._move(func, *args, **kwargs)
        if name in cls.specials:
            return cls.specials[name](cls, *args, **kwargs)
        if name in cls.formulas:
            return cls._elementwise(cls.formulas[name], args, **kwargs)
        if name.endswith("_") and hasattr(aten, name[:-1]):  # masked_fill_, add_
            plain = getattr(getattr(aten, name[:-1]), overload or "default")
            return args[0].write(plain(*args, **kwargs))
        result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            names = ", ".join(sorted(FORMULAS))
            raise PatternError(f"the prover has no formula for {func}. It has formulas of {names}")
        return result

    @classmethod
    def _move(cls, func: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, (list, tuple)):
            parts = [cls.exactly(part) for part in source]
            starts = itertools.accumulate((len(part.cells) for part in parts), initial=0)
            indices: Any = [part.at + start for part, start in zip(parts, starts, strict=False)]
            cells, dtype = [c for part in parts for c in part.cells], parts[0].dtype
        else:
            indices, cells, dtype = source.at, source.cells, source.dtype
        func = aten.reshape.default if func is aten.view.default else func
        result = func(indices, *args, **kwargs)
        return tree_map(lambda at: cls(cells, at, dtype) if isinstance(at, Tensor) else at, result)

    @classmethod
    def _elementwise(
        cls, formula: Callable[..., Any], args: Any, *, alpha: Any = 1, **options: Any
    ) -> Any:
        terms = (*args, *options.values())
        exact: list[Any] = [a if a is None or isinstance(a, str) else cls.exactly(a) for a in terms]
        tensors = [a for a in exact if isinstance(a, cls)]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        n = math.prod(shape)
        exactly = [cls.exactly(a.expand(shape)) if isinstance(a, cls) else a for a in exact]
        columns = [a.elements if isinstance(a, cls) else [a] * n for a in exactly]
        if alpha != 1:  # of a sum's second term
            columns[1] = [cls.number(alpha) * c for c in columns[1]]
        items = [formula(*column) for column in zip(*columns, strict=True)]
        dtypes = [t.dtype for t in tensors if t.is_floating_point() or t.is_complex()]
        dtype = torch.complex128 if torch.complex128 in dtypes else (dtypes or [torch.int64])[0]
        return cls.of(items, shape, dtype)

    def write(self, new: Any) -> "Exact":
        """Replace the tensor's elements by the elements of ``new``."""
        spread = type(self).exactly(new).expand(self.shape)
        for i, item in zip(self.at.flatten().tolist(), spread.elements, strict=True):
            self.cells[i] = item
        return self

    def over(self, dims: Any, keepdim: bool, fold: Callable[[list[Any]], Any]) -> Any:
        """Apply ``fold`` to the elements along ``dims``, or to all if ``dims`` is empty."""
        rank = self.dim()
        axes = [dims] if isinstance(dims, int) else dims or range(rank)
        along = sorted(d % rank for d in axes)
        rest = [d for d in range(rank) if d not in along]
        lines = self.at.permute(*rest, *along).reshape(math.prod(self.shape[d] for d in rest), -1)
        items = [fold([self.cells[i] for i in line]) for line in lines.tolist()]
        shape = [1 if d in along else self.shape[d] for d in range(rank) if keepdim or d in rest]
        return self.of(items, shape, self.dtype)


def expression(function: Callable[..., Any], symbols: Mapping[str, Any]) -> Any:
    """The formula of an elementwise function, with one element for each of its parameters.

    Raises:
        PatternError: it cannot run on elements, or calls an op without a formula.
    """
    inputs = {name: Exact.of([symbol], (), torch.float64) for name, symbol in symbols.items()}
    try:
        result = function(**inputs)
    except PatternError as error:
        raise PatternError(f"{function.__name__}: {error}") from error
    except Exception as error:
        raise PatternError(
            f"{function.__name__} cannot be traced: {type(error).__name__}: {error}. Write it "
            "without control flow on tensors and without reading their shapes"
        ) from error
    return tree_map(lambda x: x.elements[0] if isinstance(x, Exact) else number(x), result)


def _read(_cls, _x):
    raise TypeError("the value of a tensor is read")


def _copy(cls, x, *_, dtype=None, **__):
    x = cls.exactly(x)
    return cls.of(x.elements, x.shape, dtype or x.dtype)


def _total(items: list[Any]) -> Any:
    return sum(items[1:], items[0]) if items else 0


def _var_mean(_cls, x, dims=None, unbiased=None, keepdim=False, **options):
    assert options.get("correction") == 0 or unbiased is False, "the biased variance"
    square = (x - x.mean(dims, keepdim=True)).square()
    return square.mean(dims, keepdim=keepdim), x.mean(dims, keepdim=keepdim)


def _vector_norm(_cls, x, order=2, dims=None, keepdim=False, **_):
    assert order == 2, "the Euclidean norm"
    return torch.sqrt((x * x).sum(dims, keepdim=keepdim))


def _softmax(_cls, x, dim, _half=False):
    return torch.exp(x) / torch.exp(x).sum(dim, keepdim=True)


def _nll_loss(_cls, x, target, _weight, reduction, ignored):
    """The negative element of the target in each row of x (M, V); ignored rows give 0."""
    counts = target != ignored
    picked = x.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
    loss, n = torch.where(counts, -picked, 0.0), counts.sum().double()
    if reduction == 0:
        return loss, n
    return (loss.sum() if reduction == 2 else loss.sum() / n), n


def _view_as_complex(cls, x):
    parts = zip(*(part.elements for part in x.unbind(-1)), strict=True)
    return cls.of((a + sympy.I * b for a, b in parts), x.shape[:-1], torch.complex128)


def _view_as_real(cls, z):
    parts = [part for item in z.elements for part in sympy.expand(item).as_real_imag()]
    return cls.of(parts, (*z.shape, 2), torch.float64)


Exact.specials.update({
    "_local_scalar_dense": _read, "log_sigmoid_forward": lambda _, x: (-F.softplus(-x), x),
    "_to_copy": _copy, "clone": _copy, "var_mean": _var_mean,
    "sum": lambda _, x, dims=None, keepdim=False, **__: x.over(dims, keepdim, _total),
    "mean": lambda cls, x, dims=None, keepdim=False, **_: x.over(
        dims, keepdim, lambda items: _total(items) / cls.number(len(items))
    ),
    "var": lambda *args, **options: _var_mean(*args, **options)[0],
    "linalg_vector_norm": _vector_norm,
    "logsumexp": lambda _, x, *dims: torch.log(torch.exp(x).sum(*dims)),
    "ones_like": lambda _, x, **__: x * 0 + 1, "_softmax": _softmax,
    "_log_softmax": lambda *args: torch.log(_softmax(*args)), "nll_loss_forward": _nll_loss,
    "view_as_complex": _view_as_complex, "view_as_real": _view_as_real,
})  # fmt: skip
