# SPDX-License-Identifier: Apache-2.0
"""The claims of a pattern, and their proof.

- Each idiom equals the meaning; or, for each element of the tensors of its examples, the definition
  of the semantic op.
- The author's gradient, if any, equals the derivative of the meaning where it exists.

``python -m coda_inductor check`` and tests prove claims; a load only compares numbers
(``compare``). Side conditions are not proven: ``check`` tries shapes and dtypes on the example.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy

from coda_inductor.patterns.equal import difference
from coda_inductor.patterns.exact import Exact, expression
from coda_inductor.patterns.meaning import Signature
from coda_inductor.patterns.pattern import Pattern
from coda_inductor.patterns.sides import against_op, check_readable, gradient_tuple
from coda_inductor.semantic.define import parameters


@dataclass(frozen=True)
class Claim:
    """Two expressions that must be equal; with ``kinks``, also where a condition changes."""

    name: str
    left: Any
    right: Any
    kinks: bool = True


def prove(pattern: Pattern, step: Callable[[str], None] = lambda _: None) -> list[str]:
    """Prove all claims of ``pattern``; returns them, one line each.

    ``step`` is called with each claim before its proof starts.

    Raises:
        PatternError: a claim is refuted or could not be proven; it shows the difference that is
            left. Or the pattern has no claim that can be proven.
    """
    proven = []
    for claim in claims(pattern):
        step(claim.name)
        rest = difference(claim.left, claim.right, kinks=claim.kinks)
        if rest is not None:
            raise pattern.error(f"{claim.name}: {rest}")
        proven.append(claim.name)
    return proven


def claims(pattern: Pattern) -> Iterator[Claim]:
    """All claims of ``pattern``.

    Raises:
        PatternError: as :func:`check_readable`, or a formula is missing.
    """
    check_readable(pattern)
    yield from _claims_of_op(pattern) if pattern.meaning is None else _claims_of_meaning(pattern)


def _claims_of_meaning(pattern: Pattern) -> Iterator[Claim]:
    assert pattern.meaning is not None
    signature = Signature(pattern.meaning)
    symbols = {name: sympy.Symbol(name, real=True) for name in signature.names}
    meaning = expression(pattern.meaning, symbols)
    for idiom in pattern.idioms:
        if idiom is pattern.meaning:
            yield Claim(f"{idiom.__name__} has a formula", meaning, meaning)
            continue
        label = f"{idiom.__name__} = {pattern.meaning.__name__}"
        yield Claim(label, expression(idiom, symbols), meaning)
    if pattern.gradient is None:
        return
    dy = sympy.Symbol("dy", real=True)
    bound = dict(zip(parameters(pattern.gradient), (dy, *symbols.values()), strict=True))
    gradients = gradient_tuple(pattern, expression(pattern.gradient, bound))
    for name, have in zip(signature.tensors, gradients, strict=True):
        want = dy * sympy.diff(meaning, symbols[name])
        yield Claim(f"gradient with respect to {name}", have, want, kinks=False)


def _claims_of_op(pattern: Pattern) -> Iterator[Claim]:
    """Claims that each idiom equals the op's definition, on symbols for the examples' tensors."""
    for idiom, _, left, right in against_op(pattern, Exact.symbols):
        yield Claim(f"{idiom.__name__} = {pattern.op}", left.elements, right.elements)
