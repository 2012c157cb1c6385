# SPDX-License-Identifier: Apache-2.0
"""A plain torch function becomes a semantic op: schema, fake, decomposition and gradient.

A pattern's author writes the *meaning* of the idiom as an elementwise torch function of tensors
and, where annotated ``float``, numbers::

    def mish_glu(gate, up): return F.mish(gate) * up

and gets the ops ``coda_inductor::mish_glu_<digest>`` and ``..._backward``, each a single node in
joint graphs. The digest is of the file's content: an edited file has another op and other cache
keys, and two files never share one by accident. The gradient is torch's own gradient of the
meaning, unless the author defines one. A norm's author writes its scale (``Pattern.norm``).
"""

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coda_inductor.compat import OpOverload, tree_map
from coda_inductor.errors import PatternError
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sizes import alike, hint
from coda_inductor.matching import Match
from coda_inductor.patterns.conditions import constant, number
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.define import define
from coda_inductor.semantic.norms import define_norm

#: The global in which the loader stores the digest of a file's content, for its functions.
DIGEST = "__coda_digest__"


class Signature:
    """The parameters of a meaning: tensors, and numbers if annotated ``float``.

    Attributes:
        names: the names of all parameters, in order.
        tensors: the names of tensors, in order.

    Raises:
        PatternError: a default value, ``*args``, a keyword-only parameter, or no tensor at all.
    """

    def __init__(self, function: Callable[..., Any]):
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if not plain or parameter.default is not parameter.empty:
                raise PatternError(
                    f"meaning {function.__name__}: parameter {parameter} must be a plain one, "
                    "without a default (a number that varies is a parameter annotated float)"
                )
            if parameter.name in ("dy", "needs"):
                raise PatternError(
                    f"meaning {function.__name__}: its gradient also has a parameter "
                    f"{parameter.name}: rename this one"
                )
        self.names = tuple(p.name for p in parameters)
        numbers = (float, int, "float", "int")
        self.tensors = tuple(p.name for p in parameters if p.annotation not in numbers)
        if not self.tensors:
            raise PatternError(f"meaning {function.__name__}: no parameter is a tensor")

    def is_number(self, name: str) -> bool:
        """Is this parameter a number?"""
        return name not in self.tensors

    def arguments(self, match: Match) -> tuple[Any, ...]:
        """The values that the idiom bound, in the order of the meaning's parameters."""
        bound = match.bound
        return tuple(number(match, n) if self.is_number(n) else bound[n] for n in self.names)

    def condition(self, match: Match) -> Refusal | None:
        """Why tensors are not floating or of one shape, or numbers not constant; or None."""
        numbers = constant(*(n for n in self.names if self.is_number(n)))
        if (reason := numbers(match)) is not None:
            return reason
        shapes = {}
        for name in self.tensors:
            tensor = fake(match.bound[name])
            if not isinstance(tensor, Tensor):
                return refuse("gate-shape", f"{name} is not a tensor")
            if not tensor.is_floating_point():
                return refuse("gate-dtype", f"{name} is {tensor.dtype}, not a floating type")
            shapes[name] = tensor.shape
        if any(shape != shapes[self.tensors[0]] for shape in shapes.values()):
            text = " and ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            return refuse("gate-shape", f"{text} differ in shape")
        return None


def op_of(
    name: str, meaning: Callable[..., Tensor], gradient: Callable[..., Any] | None = None
) -> OpOverload:
    """The semantic op of ``meaning``, created at the first call for its name and content.

    All tensors have one shape; the result has it too, in their promoted dtype. ``gradient(dy,
    *parameters)`` returns one gradient for each tensor parameter; without it, it is torch's
    vector-Jacobian product of ``meaning``. Gradients have the dtypes of their inputs; unneeded
    gradients are empty tensors.

    Raises:
        PatternError: the meaning closes over variables, or has parameters that an op cannot have.
    """
    if meaning.__closure__:
        raise PatternError(
            f"meaning {meaning.__name__} closes over {', '.join(meaning.__code__.co_freevars)}: "
            "make them parameters or module constants"
        )
    signature = Signature(meaning)
    op_name = f"{name}_{_digest(name, meaning)}"
    op = getattr(torch.ops.coda_inductor, op_name, None)
    if op is not None:
        return op.default
    meaning = _in_one_dtype(meaning)
    schema = ", ".join(
        f"{'float' if signature.is_number(n) else 'Tensor'} {n}" for n in signature.names
    )
    gradients = ", ".join("Tensor" for _ in signature.tensors)
    backward = define(
        f"{op_name}_backward(Tensor dy, {schema}, bool[] needs) -> ({gradients})",
        fake=_empty_gradients(signature), name=f"{name}_backward", pointwise=True,
    )(_backward_definition(meaning, gradient, signature))  # fmt: skip
    return define(
        f"{op_name}({schema}) -> Tensor",
        gradient=backward, wrt=signature.tensors, name=name, pointwise=True,
    )(meaning)  # fmt: skip


def norm_of(name: str, scale: Callable[..., Tensor], values: tuple[Any, ...]) -> OpOverload:
    """The semantic op of a norm, as ``Pattern.norm`` describes it, created on the first call for
    its name and content. ``values``: values for the numbers of ``scale``, to try it."""
    first, *numbers = Signature(scale).names
    if Signature(scale).tensors != (first,) or first not in ("mean_square", "sum_square"):
        raise PatternError(
            f"norm {name}: scale takes mean_square or sum_square and numbers annotated float"
        )
    squares = torch.tensor([0, *(10.0**i for i in range(-9, 10, 3))], dtype=torch.float64)
    slopes = torch.autograd.functional.jacobian(lambda s: scale(s, *values), squares)
    if (scale(squares, *values) <= 0).any() or not torch.equal(slopes, slopes.diag().diag()):
        raise PatternError(
            f"norm {name}: scale is not positive, not of each row by itself, or has no derivative "
            "somewhere, be it at a row of zeros"
        )
    op_name = f"{name}_{_digest(name, scale)}"
    op = getattr(torch.ops.coda_inductor, op_name, None)
    if op is not None:
        return op.default
    return define_norm(name, scale, numbers, op_name=op_name, of_sum=first == "sum_square")


def _in_one_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with all tensors converted to their promoted dtype, because the matcher skips
    casts, and the op must not compute in a narrower type than the idiom."""

    def call(*arguments: Any, **named: Any) -> Any:
        tensors = [a for a in (*arguments, *named.values()) if isinstance(a, Tensor)]
        wide = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        arguments, named = tree_map(
            lambda a: a.to(wide) if isinstance(a, Tensor) else a, (arguments, named)
        )
        return function(*arguments, **named)

    return call


def _digest(name: str, meaning: Callable[..., Any]) -> str:
    content = meaning.__globals__.get(DIGEST)
    if content is None:  # not from a pattern file: a test, a notebook
        source = inspect.getsourcefile(meaning)
        exists = source is not None and Path(source).is_file()
        content = Path(str(source)).read_bytes().hex() if exists else repr(meaning.__code__.co_code)
    code = meaning.__code__
    unique = (name, content, meaning.__qualname__, code.co_firstlineno, repr(code.co_consts))
    return hashlib.sha256(repr(unique).encode()).hexdigest()[:8]


def _backward_definition(
    meaning: Callable[..., Tensor], gradient: Callable[..., Any] | None, signature: Signature
) -> Callable[..., Any]:
    def backward(dy: Tensor, *arguments: Any) -> Any:
        bound, needs = dict(zip(signature.names, arguments, strict=False)), arguments[-1]
        names = [n for n, need in zip(signature.tensors, needs, strict=True) if need]
        if gradient is not None:
            gradients: Any = _in_one_dtype(gradient)(dy, *bound.values())
            gradients = (gradients,) if isinstance(gradients, Tensor) else gradients
            by_name = dict(zip(signature.tensors, gradients, strict=True))
        elif names:

            def function(*tensors: Tensor) -> Tensor:
                return meaning(**{**bound, **dict(zip(names, tensors, strict=True))})

            # Torch's gradient of clamp writes in place, which an epilogue cannot.
            @torch.func.functionalize
            def pull(dy: Tensor, *tensors: Tensor) -> Any:
                return torch.func.vjp(function, *tensors)[1](dy)

            by_name = dict(zip(names, pull(dy, *(bound[n] for n in names)), strict=True))
        results = tuple(
            _laid_as(bound[n], by_name[n]) if n in names else bound[n].new_empty(0)
            for n in signature.tensors
        )
        return results[0] if len(results) == 1 else results

    return backward


def _laid_as(x: Tensor, gradient: Tensor) -> Tensor:
    gradient = gradient.to(x.dtype)
    if alike(gradient, x) or alike(gradient, like := torch.empty_like(x)):
        return gradient
    order = sorted(range(x.dim()), key=lambda i: hint(like.stride(i)), reverse=True)
    return gradient.permute(order).contiguous().permute([*map(order.index, range(x.dim()))])


def _empty_gradients(signature: Signature) -> Callable[..., Any]:
    def fake(_dy: Tensor, *arguments: Any) -> Any:
        bound, needs = dict(zip(signature.names, arguments, strict=False)), arguments[-1]
        results = tuple(
            torch.empty_like(bound[n]) if need else bound[n].new_empty(0)
            for n, need in zip(signature.tensors, needs, strict=True)
        )
        return results[0] if len(results) == 1 else results

    return fake
