# SPDX-License-Identifier: Apache-2.0
"""Are two sympy expressions the same function? Proven, refuted by a counterexample, or neither.

First numbers: a random point where the two differ is a refutation. Then algebra: the real line is
cut where a condition changes (relu, clamp, where), and in each piece the difference becomes a
quotient of polynomials in exponentials and roots, whose numerator must vanish. If that does not
decide, ``sympy.simplify`` is tried. If this fails too, nothing is proven.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import sympy
from sympy.core.relational import Relational

from coda_inductor.patterns.formulas import number

_POINTS = 24
_TOLERANCE = sympy.Float("1e-18")
_MOST_CASES = 243
_HYPERBOLIC = (sympy.tanh, sympy.sinh, sympy.cosh, sympy.coth, sympy.sech, sympy.csch)
_PIECEWISE = (sympy.Max, sympy.Min, sympy.Abs, sympy.sign, sympy.Heaviside)


def difference(left: Any, right: Any, *, kinks: bool = True) -> str | None:
    """None if ``left`` equals ``right`` for all values of their symbols, else the difference.

    Both are expressions, or matrices (any nested sequence) of one shape. Symbols are real unless
    their assumptions say otherwise. ``kinks=False`` leaves out the points where a condition
    changes: a derivative is not defined there.
    """
    if isinstance(left, (sympy.MatrixBase, tuple, list)):
        a, b = sympy.Matrix(left), sympy.Matrix(right)
        if a.shape != b.shape:
            return f"a {a.shape} matrix against a {b.shape} one"
        pairs = zip(a, b, strict=True)
        return next((d for x, y in pairs if (d := difference(x, y, kinks=kinks))), None)
    sides = [sympy.sympify(side) for side in (left, right)]
    left, right = (s.xreplace({f: number(f) for f in s.atoms(sympy.Float)}) for s in sides)
    if left == right:
        return None
    if (refutation := _counterexample(left, right)) is not None:
        return refutation
    for where, piece in _pieces(left - right, kinks):
        rest = _normal(piece)
        if rest != 0:
            return f"could not be proven: the difference{where} is {_short(rest)}"
    return None


def _short(expr: Any) -> str:
    text = str(expr)
    return text if len(text) <= 200 else f"{text[:200]}... ({sympy.count_ops(expr)} operations)"


def _counterexample(left: Any, right: Any) -> str | None:
    """A point where the two differ, or the reason if no point is defined for both; else None."""
    symbols = sorted((left.free_symbols | right.free_symbols), key=str)
    chance = random.Random(0)  # noqa: S311 (points to test, no secret)
    tried = 0
    for _ in range(_POINTS):
        point = {s: _value(s, chance) for s in symbols}
        a, b = (sympy.N(side.xreplace(point), 40) for side in (left, right))
        if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
            continue
        if not (a.is_real and b.is_real):
            continue
        tried += 1
        if abs(a - b) > _TOLERANCE * (1 + abs(a)):
            where = ", ".join(f"{s} = {float(v):g}" for s, v in point.items()) or "always"
            rest = _short(sympy.factor_terms(left - right))
            return (
                f"the results differ: {float(a):.9g} against {float(b):.9g} at {where}; "
                f"the difference is {rest}"
            )
    return None if tried else "neither side is a real number at any point that was tried"


def _value(symbol: sympy.Symbol, chance: random.Random) -> sympy.Rational:
    magnitude = sympy.Rational(chance.randint(1, 4000), 1000 if chance.random() < 0.8 else 250)
    if symbol.is_integer:
        magnitude = sympy.Integer(chance.randint(1, 9))
    return -magnitude if chance.random() < 0.5 and not symbol.is_positive else magnitude


def _pieces(expr: Any, kinks: bool) -> Iterator[tuple[str, Any]]:
    """(where, expression without conditions) for each possible outcome of the conditions."""
    expr = expr.rewrite(_PIECEWISE, sympy.Piecewise) if expr.has(*_PIECEWISE) else expr
    conditions = [a for a in expr.atoms(Relational) if isinstance(a, Relational)]
    if not conditions:
        yield "", expr
        return
    lines, zero = [_line(c) for c in conditions], sympy.Integer(0)
    roots: dict[Any, set[Any]] = {}
    for key, root, _ in lines:
        roots.setdefault(key, set()).add(root)
    choices = [_regions(key, sorted(points, key=float), kinks) for key, points in roots.items()]
    for number_, case in enumerate(itertools.product(*choices)):
        if number_ >= _MOST_CASES:
            yield " (too many conditions to go through)", expr
            return
        regions = dict(zip(roots, case, strict=True))
        truth = {
            c: sympy.true if c.func(sign * (regions[key][0] - root), zero) else sympy.false
            for c, (key, root, sign) in zip(conditions, lines, strict=True)
        }
        piece = expr.xreplace(truth)
        for key, (sample, on_root, _) in regions.items():
            if on_root:
                piece = piece.xreplace(_solved(key, sample))
        yield " where " + " and ".join(text for _, _, text in case), piece


def _solved(key: Any, root: Any) -> dict[Any, Any]:
    """The solution of ``key = root`` for a symbol that ``key`` is linear in; empty without one."""
    for symbol in sorted(key.free_symbols, key=str):
        slope = sympy.diff(key, symbol)
        if slope.is_number and slope != 0:
            return {symbol: sympy.expand(symbol - (key - root) / slope)}
    return {}


def _line(condition: Any) -> tuple[Any, Any, int]:
    """(key, root, sign): the condition compares ``sign * (key - root)`` with zero. The key is a
    symbol if the condition is linear in one, else a whole expression with the root 0."""
    gap = sympy.expand(condition.lhs - condition.rhs)
    symbols = gap.free_symbols
    if len(symbols) == 1:
        (symbol,) = symbols
        slope, rest = gap.coeff(symbol, 1), gap.coeff(symbol, 0)
        if slope.is_number and rest.is_number and gap == slope * symbol + rest:
            return symbol, -rest / slope, 1 if slope > 0 else -1
    flipped = gap.could_extract_minus_sign()
    return (-gap if flipped else gap), sympy.Integer(0), -1 if flipped else 1


def _regions(key: Any, roots: list[Any], kinks: bool) -> list[tuple[Any, bool, str]]:
    """(sample point, is it a root, text) for each root and each open interval between roots."""
    regions = [(roots[0] - 1, False, f"{key} < {roots[0]}")]
    for low, high in itertools.pairwise([*roots, None]):
        if kinks:
            regions.append((low, True, f"{key} = {low}"))
        last = high is None
        sample = low + 1 if last else (low + high) / 2
        regions.append((sample, False, f"{key} > {low}" + ("" if last else f" and < {high}")))
    return regions


def _normal(expr: Any) -> Any:
    """0 if ``expr`` is provably zero, else its simplified form."""
    expr = expr.rewrite(_HYPERBOLIC, sympy.exp) if expr.has(*_HYPERBOLIC) else expr
    expr = sympy.powsimp(sympy.expand_power_exp(sympy.powdenest(expr)))
    expr = _without_roots(sympy.together(sympy.expand_power_exp(expr)))
    return expr if expr == 0 else sympy.simplify(expr)


def _without_roots(expr: Any) -> Any:
    """The numerator of ``expr`` with a symbol t, t**q = base, for each root: 0 if ``expr`` is."""
    roots: dict[Any, tuple[sympy.Symbol, int]] = {}
    for power in sorted(expr.atoms(sympy.Pow), key=sympy.count_ops):
        base, exponent = power.as_base_exp()
        if exponent.is_Rational and not exponent.is_Integer:
            _, q = roots.get(base, (None, 1))
            roots[base] = (sympy.Dummy("t", positive=True), int(sympy.ilcm(q, exponent.q)))
    replaced = expr.replace(
        lambda e: e.is_Pow and e.exp.is_Rational and not e.exp.is_Integer and e.base in roots,
        lambda e: roots[e.base][0] ** (e.exp * roots[e.base][1]),
    )
    numerator = sympy.expand(sympy.fraction(sympy.cancel(sympy.together(replaced)))[0])
    for base, (t, q) in roots.items():
        numerator = sympy.expand(sympy.rem(numerator, t**q - base, t))
        numerator = sympy.expand(sympy.fraction(sympy.together(numerator))[0])
    if numerator == 0 or not roots:
        return numerator
    return numerator.xreplace({t: base ** sympy.Rational(1, q) for base, (t, q) in roots.items()})
