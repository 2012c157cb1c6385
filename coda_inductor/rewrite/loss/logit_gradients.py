# SPDX-License-Identifier: Apache-2.0
"""What stands between the gradient of a loss's logits and an LM head's, as Inductor's
decompositions write it.

The gradient of a log-sum-exp b of the same logits (a z-loss), per row a times the softmax::

    total = dlogits + a * exp(logits - b)

The gradient of soft-capped logits, ``c * tanh(z / c)``::

    t = tanh(z / c);  logits = t * c
    dz = ((dlogits * c) * (1 - t * t)) / c

As ``t`` is ``logits / c``, dz is ``dlogits * (1 - (logits / c) ** 2)``. Both are elementwise in the
gradient, the logits and values a row, so that they need nothing else of the logits' size. Casts may
stand between the steps, as 16-bit tensors have them; views too.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from coda_inductor.graph.nodes import ALIASES, aten, fake, is_cast, readers
from coda_inductor.graph.sizes import same


def with_row_term(gradient: Node, logits: Node) -> tuple[Node, tuple[Node, Node] | None]:
    """(total, (a, b)) where ``total`` is ``gradient + a * exp(logits - b)`` with a and b (..., 1);
    else ``gradient`` itself and None."""
    none = (gradient, None)
    total = _reader(gradient)
    if total is None or total.target is not aten.add.Tensor or total.kwargs:
        return none
    terms = [_bare(arg, casts=True) for arg in total.args]
    others = [term for term in terms if term is not gradient]
    if len(others) != 1 or getattr(others[0], "target", None) is not aten.mul.Tensor:
        return none
    columns = fake(logits).shape[-1]
    for a, p in (others[0].args, others[0].args[::-1]):
        exp = _bare(p, casts=True)
        if getattr(exp, "target", None) is not aten.exp.default or not _is_column(a, p, columns):
            continue
        sub = _bare(exp.args[0], casts=True)
        if sub.target is not aten.sub.Tensor or sub.kwargs:
            continue
        x, b = sub.args
        if _bare(x, casts=True) is _bare(logits) and _is_column(b, x, columns):
            return total, (a, b)
    return none


def _is_column(node: Any, rows: Any, columns: Any) -> bool:
    """Has ``node`` one value for each row of ``rows``, which has ``columns`` columns?"""
    if not isinstance(node, Node) or not isinstance(rows, Node):
        return False
    shape = fake(rows).shape
    return same(shape[-1], columns) and same(fake(node).shape, (*shape[:-1], 1))


def behind_soft_cap(gradient: Node, logits: Node) -> tuple[Node, float]:
    """(dz, c) where ``gradient`` is that of ``logits``, soft-capped by c; else ``gradient`` itself
    and 0. A cap whose tanh was kept more precisely than ``logits`` are is none: the derivative
    would lose from being made of them."""
    none = (gradient, 0.0)
    capped = _bare(logits)
    cap = _factor(capped)
    if cap is None or cap == 0:
        return none
    t = _bare(capped.args[0])
    if t.target is not aten.tanh.default:
        return none
    scaled = _reader(gradient)
    if scaled is None or _factor(scaled) != cap:
        return none
    turned = _reader(scaled)
    if turned is None or not _is_times_slope(turned, t):
        return none
    last = _reader(turned)
    back = None if last is None else _factor(last)
    if back is None or not math.isclose(back * cap, 1, rel_tol=1e-12):
        return none
    return last, cap


def _is_times_slope(node: Node, t: Node) -> bool:
    """Is ``node`` something ``* (1 - t * t)``?"""
    slope = _bare(node.args[1], casts=True) if node.target is aten.mul.Tensor else None
    if not isinstance(slope, Node) or slope.target is not aten.sub.Tensor or slope.kwargs:
        return False
    square = _bare(slope.args[1], casts=True)
    if slope.args[0] != 1 or not isinstance(square, Node) or square.target is not aten.mul.Tensor:
        return False
    return all(_bare(factor, casts=True) is t for factor in square.args)


def _bare(node: Any, casts: bool = False) -> Any:
    """What ``node`` is a view, or with ``casts`` a cast of."""
    while isinstance(node, Node) and (node.target in ALIASES or (casts and is_cast(node))):
        node = node.args[0]
    return node


def _reader(node: Node) -> Node | None:
    """The only node that reads ``node``, through casts and views."""
    _, users = readers(node, through=lambda u: u.target in ALIASES or is_cast(u))
    return users[0] if len(users) == 1 else None


def _factor(node: Node) -> float | None:
    """The number that ``node`` multiplies with, or divides by, if it is one."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or node.kwargs:
        return None
    number = node.args[1]
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        return None
    if node.target is aten.mul.Tensor:
        return float(number)
    return 1 / number if number else None
