# SPDX-License-Identifier: Apache-2.0
"""Reductions over the last dimension: ``mean_last`` where it stays, ``mean_row`` where it goes. One
over any other dimension is none of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from coda_inductor.matching.canon import Canon, named, value


def along(name: str) -> Callable[[Node], Canon | None]:
    """A reduction over the last dimension, which stays (``mean_last``) or goes (``mean_row``)."""

    def canon(node: Node) -> Canon | None:
        names = ("input", "dim", "keepdim", "dtype")
        given = named(node, *names, dim=None, keepdim=False, dtype=None)
        if given is None or given["dtype"] is not None:
            return None
        if not isinstance(given["keepdim"], bool) or not is_last(given["dim"], given["input"]):
            return None
        return Canon(f"{name}_{'last' if given['keepdim'] else 'row'}", (given["input"],))

    return canon


def is_last(dim: Any, x: Any) -> bool:
    """Is ``dim`` the last dimension of ``x``, and no other?"""
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    known = value(x)
    last = (-1,) if known is None else (-1, known.dim() - 1)
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in last


def var(node: Node) -> Canon | None:
    """Only the biased variance over the last dimension that keeps it."""
    given = named(node, "input", "dim", "unbiased", "keepdim", "correction", **VAR)
    return Canon("var_last", (given["input"],)) if given and biased(given) else None


VAR = {"dim": None, "unbiased": None, "keepdim": False, "correction": None}


def biased(given: dict[str, Any]) -> bool:
    """Is it the biased variance over the last dimension, which stays?"""
    biased = given["correction"] == 0 or given["unbiased"] is False
    return biased and given["keepdim"] is True and is_last(given["dim"], given["input"])
