# SPDX-License-Identifier: Apache-2.0
"""Reductions over the last dimension: ``mean_last`` where it stays, ``mean_row`` where it goes. One
over any other dimension is none of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.matching.canon import Canon, named, value

#: What is read as written where it is no such reduction.
ELSEWHERE = frozenset({"sum", "std", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm"})


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


def norm(node: Node) -> Canon | None:
    """The root of the sum of squares over the last dimension, which stays."""
    ord_ = "p" if node.target is torch.norm or node.op == "call_method" else "ord"
    names = ("input" if ord_ == "p" else "x", ord_, "dim", "keepdim", "dtype")
    defaults: dict[str, Any] = {ord_: 2, "dim": None, "keepdim": False, "dtype": None}
    given = named(node, *names, **defaults)
    if given is None or given[ord_] not in (2, "fro") or given["dtype"] is not None:
        return None
    last = given["keepdim"] is True and is_last(given["dim"], given[names[0]])
    return Canon("norm_last", (given[names[0]],)) if last else None


def std(node: Node) -> Canon | None:
    """A row's deviation, which stays: the biased one too, for no op is made of either."""
    given = named(node, "input", "dim", "unbiased", "keepdim", "correction", **VAR)
    last = given and given["keepdim"] is True and is_last(given["dim"], given["input"])
    return Canon("std_last", (given["input"],)) if given and last else None
