# SPDX-License-Identifier: Apache-2.0
"""The gradient of an embedding table touches only the rows that were looked up.

Before (T tokens, V rows of d columns; ``other`` exists if the LM head shares the table)::

    wide = zeros(V, d) in float32;  wide[tokens] += dy        (atomic)
    dtable = other + cast(wide)

After::

    owner = for each token, one position among the T where it occurs
    sums = zeros(T, d) in float32;  sums[owner] += dy         (atomic)
    dtable = other;  dtable[tokens] = other[tokens] + cast(sums)[owner]

Why it is valid: ``sums[owner[t]]`` is the sum of dy over all positions of token t, in float32 as
before, and is rounded and added as before; all positions of one token write the same value. The
other rows are ``other + 0``. Without ``other`` the table starts as zeros in its own dtype.

Why it pays: of V rows, at most T change. ``wide`` is 1.05 GB for a vocabulary of 128256 and 2048
columns; it is cleared, read, cast and added in passes over all of it.

Refuses (Inductor then computes the gradient): the table has less than ``LEAST_ROWS`` rows per
token; something else reads the gradient before it is added, or ``other``, which would need a copy.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.compat import unsafe_index_put, unsafe_masked_index_put_accumulate
from coda_inductor.graph.edit import replace
from coda_inductor.graph.gemms import addends
from coda_inductor.graph.nodes import arguments, aten, fake, is_cast, is_zeros
from coda_inductor.graph.sizes import hint, same
from coda_inductor.graph.splice import splice
from coda_inductor.graph.walk import only_reader
from coda_inductor.record import Record

#: Passes over the tokens' rows replace as many over the table, which must be several times larger.
LEAST_ROWS = 2

_MASKED = unsafe_masked_index_put_accumulate
_PLAIN = (aten.index_put.default, unsafe_index_put)


def gather_lookup_gradients(graph: Graph, record: Record) -> None:
    """Let gradients of embedding tables touch only rows that were looked up, in place."""
    for node in [n for n in graph.nodes if n.target is _MASKED or n.target in _PLAIN]:
        if (lookup := _lookup(node)) is not None and record.enabled("embedding_backward"):
            old, args = lookup
            replace(old, splice(old, _gradient, args))
            record.fire("embedding_backward")


def _gradient(
    tokens: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    other: Tensor | None,
    rows: int | torch.SymInt,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient (rows, d) in ``dtype``: ``other`` (rows, d), if any, plus the rows of ``dy``
    (..., d) at ``tokens`` (...) for which ``mask`` (..., 1), if any, holds."""
    d = dy.shape[-1]
    if mask is not None:  # masked tokens add zero to an existing row
        tokens = torch.where(mask.squeeze(-1), tokens, 0)
        dy = torch.where(mask, dy, 0.0)
    tokens, dy = tokens.reshape(-1), dy.reshape(-1, d)
    positions = torch.arange(tokens.shape[0], device=tokens.device)
    owner = positions.new_zeros(rows).index_put((tokens,), positions)[tokens]
    sums = torch.zeros_like(dy).index_put((owner,), dy, accumulate=True)
    values = sums[owner].to(dtype)
    if other is None:
        return values.new_zeros(rows, d).index_put((tokens,), values)
    return other.index_put((tokens,), other[tokens] + values)


def _lookup(node: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """(the gradient that ``node`` scatters, arguments of ``_gradient``) if that pays, else None."""
    args = arguments(node)
    zeros, indices, dy = (args[name] for name in ("input", "index", "values"))
    mask = args.get("mask")
    if node.target in _PLAIN and not args["accumulate"]:
        return None
    table, values = fake(node), fake(dy)
    if not is_zeros(zeros) or len(indices) != 1 or table.dim() != 2:
        return None
    rows, _ = arguments(zeros)["size"]
    (tokens,) = indices
    shape = fake(tokens).shape
    if fake(tokens).dtype is not torch.int64 or not same(values.shape, (*shape, table.shape[1])):
        return None
    if mask is not None and not same(fake(mask).shape, (*shape, 1)):
        return None
    if hint(table.shape[0]) < LEAST_ROWS * hint(fake(tokens).numel()):
        return None
    reader = only_reader(node)
    result = reader if reader is not None and is_cast(reader) else node
    added = only_reader(result)
    for other in addends(added):
        if added is None or other is result or fake(other).dtype != fake(result).dtype:
            continue
        free = other.op == "call_function" and len(other.users) == 1
        if free and same(fake(other).shape, fake(result).shape):  # its memory takes the rows
            return added, (tokens, dy, mask, other, rows, fake(result).dtype)
    return None if result is node else (result, (tokens, dy, mask, None, rows, fake(result).dtype))
