# SPDX-License-Identifier: Apache-2.0
"""The ops between the gradient of a loss's logits and the gradient of an LM head's logits, as
Inductor's decompositions write them.

The gradient of the same logits' entropy (``semantic.loss.entropy_backward``), which is added.

The gradient of a log-sum-exp b of the same logits (a z-loss), a times the softmax per row::

    total = dlogits + a * exp(logits - b)

The gradient of soft-capped logits, ``c * tanh(z / c)``::

    t = tanh(z / c);  logits = t * c
    dz = ((dlogits * c) * (1 - t * t)) / c

Because ``t`` is ``logits / c``, dz is ``dlogits * (1 - (logits / c) ** 2)``. If the logits are a
number times the head's logits (Granite, Cohere), the head's gradient is that number times the
logits' gradient. All these ops are elementwise in the gradient, the logits and vectors of rows, so
they need no other tensor of the logits' size. Casts (of 16-bit tensors) and views may be between.
"""

import itertools
import math
from typing import Any

from torch.fx import Node

from coda_inductor.graph.nodes import arguments, fake, renames_or_casts
from coda_inductor.graph.read import called
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import bare, base, only_reader
from coda_inductor.semantic.loss import entropy_backward

#: A value a row, twice: what a gradient of one value a row and the logits are multiplied by.
Columns = tuple[Node, Node]


def with_row_terms(gradient: Node, logits: Node) -> tuple[Node, Columns | None, Columns | None]:
    """(total, (a, b), (e, H)) if ``total`` is ``gradient + a * exp(logits - b)`` and the gradient
    ``e`` of the entropies H of the same logits, added in any order. What is not added is None."""
    columns: dict[str, Columns] = {}
    while (total := only_reader(gradient, renames_or_casts)) is not None:
        terms = [_term(x, logits) for x in _addends(total, gradient)]
        kinds = [*columns, *(term[0] for term in terms if term is not None)]
        if not terms or None in terms or len({*kinds}) < len(columns) + len(terms):
            break
        columns |= dict(term for term in terms if term is not None)
        gradient = total
    return gradient, columns.get("softmax"), columns.get("entropy")


def _addends(node: Any, but: Node) -> list[Node]:
    parts = [bare(x) for x in _args(node, "add")]
    inner = [(x, _addends(x, but)) for x in parts if x is not but]
    return [leaf for x, leaves in inner for leaf in leaves or [x]]


def _term(node: Any, logits: Node) -> tuple[str, Columns] | None:
    if isinstance(node, Node) and node.target is entropy_backward:
        args = arguments(node)
        same_rows = base(args["logits"]) is base(logits)
        return ("entropy", (args["dy"], args["wide"])) if same_rows else None
    columns = fake(logits).shape[-1]
    for a, p in itertools.permutations(_args(node, "mul"), 2):
        for exponent in _args(bare(p), "exp"):
            x, b = _args(bare(exponent), "sub") or (None, None)
            columnar = _is_column(a, p, columns) and _is_column(b, x, columns)
            if columnar and bare(x) is base(logits):
                return "softmax", (a, b)
    return None


def through_cap(gradient: Node, logits: Node) -> tuple[Node, float]:
    """(dz, c) if ``logits`` are soft-capped by c, and ``gradient`` is their gradient; else
    (gradient, 0). A cap whose tanh is kept with more bits than ``logits`` does not count: the
    derivative would be less exact if it were computed from the logits."""
    capped = base(logits)
    cap, t = constant_factor(capped), base(next(iter(capped.all_input_nodes), None))
    scaled = only_reader(gradient, renames_or_casts)
    product = only_reader(scaled, renames_or_casts)
    last = only_reader(product, renames_or_casts)
    if not cap or not _args(t, "tanh") or last is None or constant_factor(scaled) != cap:
        return gradient, 0.0
    back = constant_factor(last)
    if back is None or not math.isclose(back * cap, 1, rel_tol=1e-12):
        return gradient, 0.0
    return (last, cap) if _is_times_slope(product, t) else (gradient, 0.0)


def through_factor(gradient: Node) -> tuple[Node, float]:
    """(dz, f) if the only reader of ``gradient`` is ``dz = f * gradient``; else (gradient, 1)."""
    scaled = only_reader(gradient, renames_or_casts)
    factor = constant_factor(scaled)
    return (gradient, 1.0) if scaled is None or factor is None else (scaled, factor)


def _is_times_slope(node: Any, t: Node) -> bool:
    """Is ``node`` a product with the factor ``1 - t * t``?"""
    for slope in _args(node, "mul")[1:]:
        unit, square = _args(bare(slope), "sub") or (None, None)
        factors = _args(bare(square), "mul")
        if unit == 1 and factors and all(bare(factor) is t for factor in factors):
            return True
    return False


def _is_column(node: Any, rows: Any, columns: Any) -> bool:
    if not isinstance(node, Node) or not isinstance(rows, Node):
        return False
    shape = fake(rows).shape
    return same(shape[-1], columns) and same(fake(node).shape, (*shape[:-1], 1))


def _args(node: Any, op: str) -> list[Any]:
    """The operands of ``node`` if it is a plain call of ``op``; else empty."""
    call = called(node, op)
    if call is None or call.get("rounding_mode") is not None:
        return []
    return [call[name] for name in ("input", "other") if name in call.args]


def constant_factor(node: Any) -> float | None:
    """The number that ``node`` multiplies or divides by, as a factor; None for others."""
    for op in ("mul", "div"):
        for number in _args(node, op)[1:]:
            if isinstance(number, (int, float)) and math.isfinite(number):
                if op == "mul":
                    return float(number)
                return 1 / number if number else None
    return None
