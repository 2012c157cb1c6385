# SPDX-License-Identifier: Apache-2.0
"""Reductions over the last dimension: ``mean_last`` where it stays, ``mean_row`` where it goes. One
over any other dimension is none of these."""

from __future__ import annotations

from typing import Any

from coda_inductor.graph.read import Call
from coda_inductor.matching.canon import Canon, value


def along(call: Call) -> Canon | None:
    """A reduction over the last dimension, which stays (``mean_last``) or goes (``mean_row``)."""
    keepdim = call.get("keepdim")
    if call.get("dtype") is not None or not isinstance(keepdim, bool):
        return None
    if not is_last(call["dim"], call["input"]):
        return None
    return Canon(f"{call.op}_{'last' if keepdim else 'row'}", (call["input"],))


def is_last(dim: Any, x: Any) -> bool:
    """Is ``dim`` the last dimension of ``x``, and no other?"""
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    known = value(x)
    last = (-1,) if known is None else (-1, known.dim() - 1)
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in last


def var(call: Call) -> Canon | None:
    """Only the biased variance over the last dimension that keeps it."""
    return Canon("var_last", (call["input"],)) if biased(call) else None


def biased(call: Call) -> bool:
    """Is it the biased variance over the last dimension, which stays?"""
    biased = call.get("correction") == 0 or call.get("unbiased") is False
    return biased and call.get("keepdim") is True and is_last(call["dim"], call["input"])
