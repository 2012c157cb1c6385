# SPDX-License-Identifier: Apache-2.0
"""The class that pattern files define: an idiom in its spellings, and its meaning."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coda_inductor.errors import PatternError
from coda_inductor.graph.nodes import fake
from coda_inductor.matching import Idiom, Match
from coda_inductor.patterns.conditions import constant, number, row, row_wise
from coda_inductor.patterns.meaning import Signature, norm_of, op_of
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.define import parameters

#: A side condition: None if it holds, else why the pattern must not fire.
Condition = Callable[[Match], "Refusal | str | None"]


@dataclass(frozen=True)
class Pattern:
    """An idiom in its spellings, and its meaning: an elementwise torch function or a semantic op.

    With ``meaning``, nothing else is needed: the semantic op, its gradient, its arguments and the
    conditions that tensors have one shape and numbers are constant follow from it.

    Attributes:
        name: an identifier, for counters, logs and ``options["disable"]``.
        idioms: plain PyTorch functions, one per spelling, most specific first. With ``meaning``,
            their parameters have its names; without any, the meaning is the only spelling.
        op: the semantic op, an OpOverload of ``coda_inductor.semantic``.
        arguments: a function from a match to the op's arguments (graph nodes and literals).
        conditions: checked in order; the first reason wins and is shown to the user.
        result: index of the op's output that replaces the idiom, or None for a single output.
        meaning: an elementwise torch function of tensors of one shape, and of numbers where a
            parameter is annotated ``float``; instead of ``op`` and ``arguments``.
        gradient: ``(dy, *parameters) -> one gradient for each tensor``; proven equal to the
            derivative of ``meaning``. Without it the gradient is derived.
        example: values for parameters of the idioms: a number, a shape for a float64 tensor, or a
            tensor, whose values count only if they are integers. With ``op``, idioms are compared
            with the op on these values. A tuple holds several examples; each idiom uses the
            examples that fit it best. Missing values are derived from ``meaning``.

    Raises:
        PatternError: the name is not an identifier, or not exactly one of op and meaning is set.
    """

    name: str
    idioms: tuple[Callable[..., Any], ...] = ()
    op: Any = None
    arguments: Any = None
    conditions: tuple[Condition, ...] = ()
    result: int | None = None
    meaning: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    example: Mapping[str, Any] | tuple[Mapping[str, Any], ...] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not str(self.name).isidentifier():
            raise PatternError(f"pattern name {self.name!r} must be an identifier, like my_gate")
        if (self.op is None) == (self.meaning is None):
            raise self.error("set either meaning (a torch function) or op (a semantic op)")
        for name in ("idioms", "conditions"):
            if not isinstance(getattr(self, name), (tuple, list)):
                raise self.error(f"{name} must be a tuple, like (first,)")
        if self.meaning is not None:
            self._define()
        elif self.arguments is None or not self.idioms:
            raise self.error("with op, set idioms and arguments too")

    def error(self, why: str) -> PatternError:
        """The error of a pattern file: ``why``, with the name of the pattern."""
        return PatternError(f"pattern {self.name}: {why}")

    @classmethod
    def norm(
        cls,
        name: str,
        scale: Callable[..., Any],
        idioms: tuple[Callable[..., Any], ...],
        **how: Any,
    ) -> "Pattern":
        """The pattern of a norm ``x * scale * weight`` over the last dimension; its op, gradient
        and deferral past GEMMs follow from ``scale``.

        Args:
            name: see :class:`Pattern`.
            scale: a positive elementwise torch function of ``mean_square`` or ``sum_square``, the
                mean or the sum of the squares of each row of x, and of numbers.
            idioms: functions of x, these numbers and, if there is one, weight.
            how: ``conditions``; ``example`` (for numbers of which 0.5 is no good example).
        """
        numbers = parameters(scale)[1:]
        example = {**dict.fromkeys(numbers, 0.5), **how.get("example", {})}
        for idiom in idioms:
            if {*parameters(idiom)} - {"weight"} != {"x", *numbers}:
                expected = ", ".join(("x", *numbers))
                raise PatternError(f"norm {name}: an idiom takes {expected} and may take weight")

        def arguments(match: Match) -> tuple[Any, ...]:
            args = [number(match, n) for n in numbers]
            return (match.bound["x"], row(match, "weight"), *args, fake(match.root).dtype)

        return cls(
            name,
            idioms,
            op=norm_of(name, scale, tuple(example[n] for n in numbers)),
            arguments=arguments,
            conditions=(constant(*numbers), row_wise("weight"), *how.get("conditions", ())),
            result=0,
            example={"x": (2, 3), "weight": (3,), **example},
        )

    def _define(self) -> None:
        assert self.meaning is not None
        if self.arguments is not None or self.result is not None:
            raise self.error("arguments and result go with op, not meaning")
        signature = Signature(self.meaning)
        derived = {
            "idioms": tuple(self.idioms) or (self.meaning,),
            "op": op_of(self.name, self.meaning, self.gradient),
            "arguments": signature.arguments,
            "conditions": (signature.condition, *self.conditions),
        }
        for name, item in derived.items():
            object.__setattr__(self, name, item)  # it is frozen

    @property
    def examples(self) -> tuple[Mapping[str, Any], ...]:
        """All examples that are not empty."""
        several = self.example if isinstance(self.example, (tuple, list)) else (self.example,)
        return tuple(filter(None, several))

    @functools.cached_property
    def traced(self) -> tuple[Idiom, ...]:
        """The idioms as the matcher reads them."""
        return tuple(Idiom(function) for function in self.idioms)

    def call(self, *arguments: Any) -> Any:
        """The op's output, for ``arguments``, that replaces the idiom."""
        result = self.op(*arguments)
        return result if self.result is None else result[self.result]

    def refusal(self, match: Match) -> Refusal | None:
        """The reason of the first side condition that does not hold, or None."""
        why = next((why for c in self.conditions if (why := c(match)) is not None), None)
        return refuse("condition", why) if isinstance(why, str) else why
