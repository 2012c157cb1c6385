# SPDX-License-Identifier: Apache-2.0
"""Create semantic ops, each from the plain torch function that defines it, and its gradient.

Only this module creates ops, built-in ones and those in pattern files (``patterns.meaning``): it
registers the schema, which annotations tell, the fake, the kernel and the derivative.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coda_inductor import compat
from coda_inductor.compat import OpOverload, storage, tree_map

LIB = torch.library.Library("coda_inductor", "FRAGMENT")
#: Results of :func:`once`, and the most that are kept.
_MOST_RESULTS = 8192
_RESULTS: dict[Hashable, Any] = {}
_LITERALS = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Definition:
    """One semantic op.

    Attributes:
        function: the torch function that defines it.
        name: its name in counters and reports.
        counted_by_rewrite: does the pass that rewrites it count it? Then its decomposition is plain
            work, which does not count when a GEMM absorbs it.
        gradient: see :func:`define`; None for an op that does not differentiate.
    """

    function: Callable[..., Any]
    name: str
    counted_by_rewrite: bool = False
    gradient: Callable[..., Any] | None = None


#: Every semantic op.
DEFINITIONS: dict[OpOverload, Definition] = {}
#: The ops that cross columns within a head, as epilogues can: they stay until GEMMs are fused.
CROSSING: set[OpOverload] = set()
#: The ops whose gradient does not read the tensor that they map.
LINEAR: set[OpOverload] = set()
#: A part of an op's name -> the words for such ops in messages.
WORDS: dict[str, str] = {}


def schema_text(function: Callable[..., Any], results: str = "") -> str:
    """The schema of an op with the name, annotations and defaults of ``function``. ``results``:
    names of the results, separated by spaces."""
    schema = torch.library.infer_schema(function, mutates_args=(), op_name=function.__name__)
    arguments, _, types = schema.replace("SymInt", "int").partition(" -> ")
    if not results:
        return f"{arguments} -> {types}"
    return f"{arguments} -> ({', '.join(f'Tensor {name}' for name in results.split())})"


def define(
    schema: str = "",
    *,
    results: str = "",
    gradient: Callable[..., Any] | None = None,
    wrt: Sequence[str] = (),
    fake: Callable[..., Any] | None = None,
    name: str = "",
    pointwise: bool = False,
    counted_by_rewrite: bool = False,
) -> Callable[[Callable[..., Any]], OpOverload]:
    """A decorator: it registers the op that a function of plain torch defines, and returns the op.

    Args:
        schema: by default as the function's annotations tell.
        results: the names of the results; all but the first are statistics without gradient.
        gradient: a semantic op or a function. Its first parameter is the gradient of the op's first
            result; the others are named like the op's inputs and statistics, or ``needs``: a list
            that tells which gradients are needed. Gradients that are not needed may have any value.
        wrt: the inputs for which ``gradient`` returns gradients.
        fake: computes shapes and dtypes, if ``function`` cannot.
        name: see :class:`Definition`; by default the op's name.
        pointwise: does each element of the results depend only on elements at the same index?
        counted_by_rewrite: see :class:`Definition`.
    """
    tags = [torch.Tag.pointwise] * pointwise

    def register(function: Callable[..., Any]) -> OpOverload:
        text = schema or schema_text(function, results)
        shapes = functools.partial(once, fake or function)
        op = opaque(text, _fresh(function), shapes, *tags, gradient=gradient, wrt=wrt)
        title = name or text.split("(", maxsplit=1)[0]
        DEFINITIONS[op] = Definition(function, title, counted_by_rewrite, gradient)
        return op

    return register


def opaque(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *tags: torch.Tag,
    gradient: Callable[..., Any] | None = None,
    wrt: Sequence[str] = (),
) -> OpOverload:
    """Register the op ``coda_inductor::<schema>``, which no graph decomposes. Returns the op.
    ``gradient`` and ``wrt`` as for :func:`define`."""
    name = schema.split("(", maxsplit=1)[0]
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIB.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"coda_inductor::{name}", fake, lib=LIB)
    op = getattr(torch.ops.coda_inductor, name).default
    if gradient is not None:
        _differentiable(op, gradient, tuple(wrt))
    return op


def compose(schema: str = "", *, name: str) -> Callable[[Callable[..., Any]], OpOverload]:
    """A decorator: it registers the op that consists of the ops in a function, and returns the op.
    AOTAutograd traces these, and their gradients, instead of the op. ``schema`` as for ``define``.
    """

    def register(function: Callable[..., Any]) -> OpOverload:
        text = schema or schema_text(function)
        op_name = text.split("(", maxsplit=1)[0]
        LIB.define(text, tags=(torch.Tag.pt2_compliant_tag,))
        LIB.impl(op_name, function, "CompositeImplicitAutograd")
        op = getattr(torch.ops.coda_inductor, op_name).default
        DEFINITIONS[op] = Definition(function, name)
        return op

    return register


def _differentiable(op: OpOverload, gradient: Callable[..., Any], wrt: tuple[str, ...]) -> None:
    names = parameters(op)
    statistics = [result.name for result in compat.schema(op).returns[1:]]
    arguments = parameters(gradient)[1:]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = dict(zip(names, inputs, strict=True))
        if statistics:
            ctx.mark_non_differentiable(*output[1:])
            values.update(zip(statistics, output[1:], strict=True))
        values = {key: values[key] for key in arguments if key != "needs"}
        ctx.tensors = [key for key, item in values.items() if isinstance(item, Tensor)]
        ctx.save_for_backward(*(values[key] for key in ctx.tensors))
        ctx.others = {key: item for key, item in values.items() if key not in ctx.tensors}

    def differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        needs = [ctx.needs_input_grad[names.index(key)] for key in wrt]
        values = {**ctx.others, **dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))}
        gradients = gradient(dy, *({**values, "needs": needs}[key] for key in arguments))
        gradients = (gradients,) if isinstance(gradients, Tensor) else gradients
        by_name = {k: g for k, g, need in zip(wrt, gradients, needs, strict=True) if need}
        return tuple(by_name.get(key) for key in names)

    torch.library.register_autograd(
        op.name().partition(".")[0], differentiate, setup_context=save, lib=LIB
    )


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a plain function, or of an op."""
    if (schema := compat.schema(function)) is not None:
        return tuple(argument.name for argument in schema.arguments)
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with results in new memory, each in its own: an op may return neither one of its
    inputs nor one tensor twice, but some gradients do both (of ``gate + up``, for example)."""

    def call(*arguments: Any) -> Any:
        storages = {storage(a) for a in arguments if isinstance(a, Tensor)}

        def fresh(result: Tensor) -> Tensor:
            result = result.clone() if storage(result) in storages else result
            storages.add(storage(result))
            return result

        with isolated():
            return tree_map(fresh, function(*arguments))

    return call


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A context that runs code as if called at top level, without autocast.

    The handler of a dispatch mode runs without functorch's dispatch keys, which a gradient inside a
    kernel needs, so all keys are restored. That turns autocast on again, which would cast float32
    products to 16 bits, so it is turned off."""
    full = compat.dispatch_keyset_full()
    include = compat.dispatch_tls_local_include_set()
    keys = compat.ForceDispatchKeyGuard(include, full - full)
    with torch.no_grad(), compat.disable_current_modes(), keys, compat.DisableAutocast():
        yield


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that statistics are computed in: float32 for 16-bit types."""
    return torch.promote_types(dtype, torch.float32)


class _Shape(tuple[Any, ...]):
    """The sizes, strides, dtype and device of a tensor, and its offset in its memory."""

    __slots__ = ()


class UncertainError(Exception):
    """A result may depend on more than the compared properties, for example on a symbolic size."""


def once(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` for fake tensors, computed once. All its results must be new memory.

    Torch takes 0.1 to 5 ms to run an op on fake tensors, and layers repeat. The sizes, strides,
    dtype and device of a result depend only on the same properties of the arguments."""
    try:
        key = (function, properties(args))
    except UncertainError:
        return function(*args)
    known = _RESULTS.get(key)  # another thread may clear them at any time
    if known is not None:
        return tree_map(_empty, known)
    result = function(*args)
    with contextlib.suppress(UncertainError):
        if len(_RESULTS) >= _MOST_RESULTS:
            _RESULTS.clear()
        _RESULTS[key] = tree_map(_new, result)
    return result


def properties(value: Any) -> Hashable:
    """What results that are computed from ``value``, tensors and literals, depend on. Raises
    UncertainError if that may be more."""
    if isinstance(value, Tensor):
        return _shape(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(properties, value))
    if value is None or isinstance(value, _LITERALS):
        return type(value), value
    raise UncertainError


def _shape(x: Tensor) -> _Shape:
    """The properties of ``x``. Known values are refused, because an op may compute with them."""
    sizes, strides, offset = tuple(x.shape), x.stride(), x.storage_offset()
    fixed = type(sum((*sizes, *strides, offset))) is int
    if not fixed or x.layout != torch.strided or getattr(x, "constant", None) is not None:
        raise UncertainError
    return _Shape((sizes, strides, offset, x.dtype, x.device, x.requires_grad))


def _new(result: Any) -> _Shape:
    if not isinstance(result, Tensor) or result.storage_offset() != 0 or result.requires_grad:
        raise UncertainError
    return _shape(result)


def _empty(shape: _Shape) -> Tensor:
    sizes, strides, _, dtype, device, _ = shape
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
