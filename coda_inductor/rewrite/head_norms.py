# SPDX-License-Identifier: Apache-2.0
"""Norms of each head of queries and keys are told of the rows that their projection makes.

Before (y is M x H d, made in the epilogue of a GEMM)::

    q, rstd = rms_norm(permute(view(y, [B, T, H, d]), [0, 2, 1, 3]), weight, eps)
    dx, dweight = rms_norm_backward(dq, permute(...), weight, rstd)

After::

    gain = weight, once a head
    q = permute(view(rms_norm_heads(y, weight, gain, eps, d), [B, T, H, d]), [0, 2, 1, 3])
    rstd = rsqrt(mean(x * x) + eps), x = permute(...)                         in the backward pass

Why it is valid: views move nothing, and the norm of a head reads that head. Why it pays: a tile of
whole heads has all that a norm of one reads, so that an epilogue can normalize (``fuse.heads``),
and rotate what it normalized. The backward pass reads what was normalized anyway: it computes the
statistics again in the same kernel, and the forward pass stores none. Where no epilogue normalizes,
the rest is undone as if nothing had happened, and nobody makes the gain.

Refuses: what no GEMM's epilogue makes; statistics that something else reads than the norm's
gradient; results that a reader counts on being laid out otherwise; projections, or all norms, that
policy leaves alone. One head a row of a three-dimensional tensor is no head, but a norm like any
other.
"""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import producer
from coda_inductor.graph.nodes import aten, base, fake, place
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.graph.splice import splice
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.heads import Place, lead_of, place_of, unlike, with_cast
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import rms_norm, rms_norm_backward, rms_norm_heads, rms_rstd

#: What counts when an epilogue normalizes heads.
NAME = "head_norm"


def norm_rows(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every norm of heads where it is valid. Counts nothing: a norm that an
    epilogue absorbs counts."""
    if not (record.enabled(NAME) and record.enabled("rms_norm")):
        return
    scope = Scope(graph)
    for norm in [n for n in graph.nodes if n.target is rms_norm and n in scope.forward]:
        if not _of_heads(norm):
            continue
        if (why := _norm_rows(graph, norm, scope, record)) is not None:
            record.refuse("rms_norm", place(norm), why)
        else:
            scope = Scope(graph)


def _of_heads(norm: Node) -> bool:
    """Is it a norm of the heads of something's rows? With one token and no heads, what it reads has
    two last dimensions of the size of a row as well."""
    x = norm.args[0]
    x = x.args[0] if x.target is aten.permute.default else x
    shape, row = fake(x).shape, fake(base(x)).shape[-1]
    if len(shape) < 3 or (len(shape) == 3 and same(shape[-2], 1)):
        return False
    return same(shape[-2] * shape[-1], row) and not same(fake(base(x)).shape, shape)


def _norm_rows(graph: Graph, norm: Node, scope: Scope, record: Record) -> Refusal | None:
    """Apply the rewrite to ``norm``, or say why not."""
    outputs = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
    if 0 not in outputs:
        return refuse("not-read", "its result is not read")
    readers = list(outputs[1].users) if 1 in outputs else []
    for user in readers:
        if user.target is not rms_norm_backward or user in scope.forward:
            return refuse("norm-statistics-read", "its rstd is read")
    found = place_of(norm.args[0], scope, record)
    if isinstance(found, Refusal):
        return found
    root = outputs[0]
    if fake(root).dtype == statistics_dtype(fake(norm.args[0]).dtype):
        root = with_cast(root)  # Gemma's, which nothing was rounded before
    gemm = producer(found.rows)
    assert gemm is not None, "found by it"
    if (why := unlike(root, found) or record.policy.head_norms_lose(gemm)) is None:
        for user in readers:
            _read_again(graph, norm, user)
        _rewrite(graph, norm, root, found)
        prune([root, *outputs.values()])
    return why


def _read_again(graph: Graph, norm: Node, backward: Node) -> None:
    """Let the gradient ``backward`` compute the statistics of ``norm`` itself. The tag keeps
    torch's partitioner from computing them in the forward pass, with a kernel of their own."""
    again = {"partitioner_tag": "must_be_in_backward"}
    args = norm.args[0], norm.args[2]
    rstd = splice(graph, backward, _rstd, args, like=backward, meta=again)
    backward.update_arg(3, rstd)


def _rstd(x: Tensor, eps: float) -> Tensor:
    return rms_rstd(x.to(statistics_dtype(x.dtype)), eps)


def _rewrite(graph: Graph, norm: Node, root: Node, found: Place) -> None:
    weight, eps = norm.args[1:3]
    put, plain = Put(graph, like=norm, pattern=(NAME, norm.name)), Put(graph, like=norm)
    count, size = fake(found.heads).shape[-2:]
    rows, gain = found.rows, None
    if weight is not None:
        gain = splice(graph, norm, _gain, (weight, count, size), like=norm)
    with graph.inserting_before(norm):
        lead = lead_of(plain, found.heads)
        if not same(fake(rows).shape[:-1], fake(found.heads).shape[:-2]):
            rows = plain.reshape(rows, [*lead, fake(rows).shape[-1]])
        new = put(rms_norm_heads, rows, weight, gain, eps, size, fake(root).dtype)
        new = plain(aten.view.default, new, [*lead, count, size])
        if found.order is not None:
            new = plain(aten.permute.default, new, found.order)
    root.replace_all_uses_with(new)


def _gain(weight: Tensor, count: int, size: int) -> Tensor:
    """One value a column of a projection."""
    return weight.reshape(1, -1).expand(count, size).reshape(-1)
