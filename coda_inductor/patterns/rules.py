# SPDX-License-Identifier: Apache-2.0
"""The matrix identities that rewrites rest on, as sympy pairs: small matrices of free symbols.

Each holds entry by entry for all values of its symbols, and its form does not depend on the sizes:
two to four rows and columns stand for any number. ``docs/architecture.md`` says what each is for.
A pattern names those it needs (``Pattern.rules``); they are proven when it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

Pairs = list[tuple[Any, Any]]


def _matrix(name: str, rows: int, columns: int) -> sympy.Matrix:
    return sympy.Matrix(rows, columns, lambda i, j: sympy.Symbol(f"{name}{i}{j}", real=True))


def _vector(name: str, n: int) -> list[sympy.Symbol]:
    return list(sympy.symbols(f"{name}0:{n}", real=True))


def _row_sums(matrix: sympy.Matrix) -> sympy.Matrix:
    return matrix * sympy.ones(matrix.cols, 1)


def row_scale() -> Pairs:
    """R1: ``(D_r X) W = D_r (X W)``: a row scale waits until after the GEMM."""
    X, W, D = _matrix("x", 2, 3), _matrix("w", 3, 2), sympy.diag(*_vector("r", 2))
    return [((D * X) * W, D * (X * W))]


def statistics_by_tile() -> Pairs:
    """R2: a row's sum of squares is the sum over tiles of the tiles' sums of squares."""
    X = _matrix("x", 2, 4)
    squares = X.multiply_elementwise(X)
    return [(_row_sums(squares), _row_sums(squares[:, :2]) + _row_sums(squares[:, 2:]))]


def dot_of_gradient() -> Pairs:
    """R3: ``rowsum((dz Wt) * X) = rowsum(dz * (X W))``: a norm's dot is known one GEMM earlier."""
    X, W, dz = _matrix("x", 2, 3), _matrix("w", 3, 2), _matrix("z", 2, 2)
    left = _row_sums((dz * W.T).multiply_elementwise(X))
    return [(left, _row_sums(dz.multiply_elementwise(X * W)))]


def weight_gradient() -> Pairs:
    """R4: ``(D_r X)t dz = Xt (D_r dz)``: the row scale rides on the gradient."""
    X, dz, D = _matrix("x", 2, 3), _matrix("z", 2, 2), sympy.diag(*_vector("r", 2))
    return [((D * X).T * dz, X.T * (D * dz))]


def layer_norm() -> Pairs:
    """R5: ``LN(x) W + b = D_s [(x * g) W] - (s m)(gt W) + (bt W + b)`` with s the reciprocal
    standard deviations and m the means of the rows, g and b the norm's weight and bias."""
    X, W = _matrix("x", 2, 3), _matrix("w", 3, 2)
    s, m, gamma = _vector("s", 2), _vector("m", 2), _matrix("g", 1, 3)
    beta, bias = _matrix("b", 1, 3), _matrix("c", 1, 2)
    ones = sympy.ones(2, 1)
    centred = sympy.Matrix(2, 3, lambda i, j: (X[i, j] - m[i]) * s[i] * gamma[j] + beta[j])
    scaled = X.multiply_elementwise(ones * gamma)
    means = sympy.Matrix([a * b for a, b in zip(s, m, strict=True)])
    right = sympy.diag(*s) * (scaled * W) - means * (gamma * W) + ones * (beta * W + bias)
    return [(centred * W + ones * bias, right)]


def column_pairs() -> Pairs:
    """R6: columns of two weights that alternate give the columns of two products that alternate, so
    that a gate of columns 2 j and 2 j + 1 is the gate of the two products at column j."""
    X, G, U = _matrix("x", 2, 3), _matrix("g", 3, 2), _matrix("u", 3, 2)
    both = sympy.Matrix.hstack(*(m[:, j] for j in range(2) for m in (G, U)))
    product = X * both
    gate = sympy.Function("gate")
    left = sympy.Matrix(2, 2, lambda i, j: gate(product[i, 2 * j], product[i, 2 * j + 1]))
    right = sympy.Matrix(2, 2, lambda i, j: gate((X * G)[i, j], (X * U)[i, j]))
    return [(left, right)]


#: By the names that the documentation uses.
RULES: dict[str, Callable[[], Pairs]] = {
    "R1": row_scale,
    "R2": statistics_by_tile,
    "R3": dot_of_gradient,
    "R4": weight_gradient,
    "R5": layer_norm,
    "R6": column_pairs,
}
