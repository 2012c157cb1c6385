# SPDX-License-Identifier: Apache-2.0
"""Side conditions that several patterns share, and the numbers that they need."""

from collections.abc import Callable

import torch
from torch.fx import Node

from coda_inductor.graph.nodes import fake
from coda_inductor.matching import Flat, Match
from coda_inductor.refusal import Refusal, refuse


def number(match: Match, name: str) -> float:
    """The number bound to ``name``, which is ``constant``. With dynamic shapes Dynamo records a
    symbol for a float; reading its value adds a guard, so that another value has another graph."""
    return float(fake(match.bound[name]))


def constant(*names: str, none: bool = False) -> Callable[[Match], Refusal | None]:
    """Condition: each of ``names`` that the spelling has is a literal or a symbol of known value,
    or (``none``) None."""

    def condition(match: Match) -> Refusal | None:
        for name in filter(match.bound.__contains__, names):
            bound = fake(match.bound[name])
            symbol = isinstance(bound, (torch.SymFloat, torch.SymInt)) and bound.node.has_hint()
            literal = isinstance(bound, (int, float, str)) or (none and bound is None)
            if not symbol and not literal:
                tensor = isinstance(bound, torch.Tensor)
                why = ": it is a tensor, which is read only when the model runs" if tensor else ""
                return refuse("not-constant", f"{name} is not a constant{why}")
        return None

    return condition


def row_wise(*vectors: str) -> Callable[[Match], Refusal | None]:
    """The condition that the result has the shape of the floating input ``x``, and that each of
    ``vectors`` in the spelling has one value per column: (d,) or (1, ..., 1, d)."""

    def condition(match: Match) -> Refusal | None:
        x, result = fake(match.bound["x"]), fake(match.root)
        if not isinstance(x, torch.Tensor) or not isinstance(result, torch.Tensor):
            return refuse("idiom-form", "the shape of the input is unknown")
        if not x.is_floating_point():
            return refuse("norm-input-dtype", f"the input is {x.dtype}, not a floating type")
        if result.shape != x.shape:
            text = f"the result {tuple(result.shape)} is not shaped like the input {tuple(x.shape)}"
            return refuse("norm-result-shape", text)
        for name in vectors:
            if (node := match.bound.get(name)) is not None:
                vector = fake(node)
                row = isinstance(vector, torch.Tensor) and vector.shape[-1:] == x.shape[-1:]
                if not row or any(n != 1 for n in vector.shape[:-1]):
                    text = f"the {name} is not one value per column"
                    return refuse("norm-weight-shape", text)
        return None

    return condition


def row(match: Match, name: str) -> Node | Flat | None:
    """The binding of ``name``, which satisfies ``row_wise``, as (d,); None if it is absent."""
    bound = match.bound.get(name)
    vector = fake(bound)
    return Flat(bound) if isinstance(vector, torch.Tensor) and vector.dim() > 1 else bound
