# SPDX-License-Identifier: Apache-2.0
"""Values of tensors as expressions in the indices of their elements, whatever the sizes are.

``Affine``, 3 + 2 * (index along the last dimension), and ``Choice``, one of two numbers by a
condition on the indices. They hold for every index and every size: only that indices are not
negative is used. Dimensions are counted from the right, -1 is the last, as broadcasting does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from coda_inductor.refusal import Refusal

Number: TypeAlias = bool | int | float
#: Factors and offsets beyond are refused: within, no int64 overflows for indices below 2**40.
MAX_FACTOR = 2**20


class NotProvenError(Exception):
    """Why a value is not known for every size; the text is for users."""


class DataError(NotProvenError):
    """A value is not known at any size either; ``refusal`` says why."""

    def __init__(self, refusal: Refusal):
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass(frozen=True)
class Affine:
    """``constant`` plus, for each (dimension, factor) of ``slopes``, factor times the index along
    that dimension. Factors are not zero; dimensions are negative and in ascending order."""

    constant: int
    slopes: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: Affine) -> Affine:
        slopes = dict(self.slopes)
        for dim, factor in other.slopes:
            slopes[dim] = slopes.get(dim, 0) + factor
        return _affine(self.constant + other.constant, slopes)

    def __mul__(self, factor: int) -> Affine:
        slopes = {dim: slope * factor for dim, slope in self.slopes}
        return _affine(self.constant * factor, slopes)

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    def slope(self, dim: int) -> int:
        return dict(self.slopes).get(dim, 0)


@dataclass(frozen=True)
class Choice:
    """``yes`` where every expression of ``when`` is at least 0, else ``no``. Without conditions it
    is the constant ``yes``."""

    when: frozenset[Affine]
    yes: Number
    no: Number


Value: TypeAlias = Affine | Choice


def index(dim: int) -> Affine:
    """The index along ``dim``."""
    return Affine(0, ((dim, 1),))


def constant(number: Number) -> Choice:
    """``number`` everywhere."""
    return Choice(frozenset(), number, number)


def choice(when: Iterable[Affine], yes: Number, no: Number) -> Choice:
    """A ``Choice`` with conditions that are always true, or follow from others, left out."""
    least: dict[tuple[tuple[int, int], ...], int] = {}
    for condition in when:
        slopes, offset = condition.slopes, condition.constant
        if slopes:  # 2 i - 2 j + 1 >= 0 says of integers what i - j >= 0 does
            divisor = math.gcd(*(factor for _, factor in slopes))
            slopes = tuple((dim, factor // divisor) for dim, factor in slopes)
            offset //= divisor
        if offset >= 0 and all(factor > 0 for _, factor in slopes):
            continue
        if offset < 0 and all(factor < 0 for _, factor in slopes):
            return constant(no)
        least[slopes] = min(offset, least.get(slopes, offset))
    if not least or yes == no:
        return constant(yes)
    return Choice(frozenset(Affine(c, slopes) for slopes, c in least.items()), yes, no)


def as_affine(value: Value) -> Affine:
    """``value`` as an integer expression.

    Raises:
        NotProvenError: if it is none.
    """
    if isinstance(value, Affine):
        return value
    if value.when or not isinstance(value.yes, int):
        raise NotProvenError("it computes with numbers that are no multiples of an index")
    return _affine(int(value.yes), {})


def true_when(value: Value) -> frozenset[Affine]:
    """The conditions that all hold exactly where the boolean ``value`` is true.

    Raises:
        NotProvenError: if that is no conjunction, as "not (a and b)" is not.
    """
    if isinstance(value, Choice):
        if not value.when:
            return frozenset() if value.yes else frozenset({Affine(-1)})
        if value.yes and not value.no:
            return value.when
        if value.no and not value.yes and len(value.when) == 1:
            (condition,) = value.when
            return frozenset({condition * -1 + Affine(-1)})
    raise NotProvenError("it joins conditions on the indices by more than a chain of 'and'")


def both(left: Value, right: Value) -> Choice:
    """``left and right``."""
    return choice(true_when(left) | true_when(right), True, False)


def negation(value: Value) -> Choice:
    """``not value``."""
    if isinstance(value, Affine):
        raise NotProvenError("it negates numbers")
    return choice(value.when, not value.yes, not value.no)


def compare(op: str, left: Affine, right: Affine) -> Choice:
    """``left op right`` for integers; ``op`` is one of lt, le, gt, ge, eq, ne."""
    more = left - right
    less = more * -1
    if op in ("eq", "ne"):
        return choice((more, less), op == "eq", op == "ne")
    difference = more if op in ("gt", "ge") else less
    return choice([difference + Affine(-1 if op in ("gt", "lt") else 0)], True, False)


def substitute(value: Value, by: Mapping[int, Affine]) -> Value:
    """``value`` with the index along each dimension of ``by`` replaced. Others stay."""
    if isinstance(value, Choice):
        return choice([_substitute(c, by) for c in value.when], value.yes, value.no)
    return _substitute(value, by)


def _substitute(value: Affine, by: Mapping[int, Affine]) -> Affine:
    result = Affine(value.constant)
    for dim, factor in value.slopes:
        result += by.get(dim, index(dim)) * factor
    return result


def _affine(offset: int, slopes: dict[int, int]) -> Affine:
    if any(abs(number) > MAX_FACTOR for number in (offset, *slopes.values())):
        raise NotProvenError(f"it computes with factors or offsets beyond {MAX_FACTOR}")
    return Affine(offset, tuple(sorted((dim, f) for dim, f in slopes.items() if f)))
