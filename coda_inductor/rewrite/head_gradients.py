# SPDX-License-Identifier: Apache-2.0
"""What attention's backward pass makes of queries and keys becomes their projection's gradient in
one kernel: the rotation back, the gradient of a norm of each head, the row scale for the wgrad.

Before (dq is B x H x T x d, from attention; z what was normalized)::

    dy = rotate(dq, cos, sin, inverse);  dx, dweight = rms_norm_backward(dy, z, weight, rstd)
    rows = view(permute(dx, [0, 2, 1, 3]), [M, H * d]);  scaled = rows * rstd of the norm before

After::

    rows, scaled, dweight = head_gradient(dq, cos, sin, z, weight, rstd of the norm before)

Why it is valid: it is the same function (``runtime.head_gradients``), rounded once at its end. Why
it pays: Inductor's kernels load each element at two places and compute which, write the product
whose columns sum up to the weight's gradient, and store what two GEMMs read in different scales;
they take twice the time of the traffic (docs/gotchas.md, Rotary).

Refuses, silently: rotations of the forward pass, which belong to a projection's epilogue; of part
of a head; by tables that differ between heads; results that are laid out otherwise than rows;
symbolic numbers of heads; where kernels do not run, or a call of the op may take the host longer
than it saves (``LEAST``).
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, prune, settle
from coda_inductor.graph.nodes import aten, fake, is_cast, readers, renames_or_casts
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import hint, laid_out_alike, same
from coda_inductor.graph.splice import splice
from coda_inductor.program.dtypes import HALF
from coda_inductor.record import Record
from coda_inductor.runtime.head_gradients import HEAD_GRADIENT
from coda_inductor.semantic.define import statistics_dtype
from coda_inductor.semantic.norms import rms_norm, rms_norm_backward
from coda_inductor.semantic.rotary import rotate

#: What counts.
NAME = "head_gradient"
#: Elements from which on a call is worth its host time, some 20 us.
LEAST = 2**22
#: From (B, T, H, d) to (B, H, T, d), and back.
_TURN = [0, 2, 1, 3]


def take_gradients(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every rotation of a gradient where it is valid, before norms wait."""
    if not (record.enabled(NAME) and record.policy.other_kernels):
        return
    scope, gated = Scope(graph), record.policy.options.gate == "auto"
    for node in [n for n in graph.nodes if n.target is rotate and n not in scope.forward]:
        order = _order(node)
        small = gated and hint(fake(node).numel()) < LEAST
        if order is not None and not small and _rewrite(graph, node, order):
            record.fire(NAME)


def scale_gradients(graph: Graph, _record: Record) -> None:
    """Let the op make the rows that the wgrad reads too, once norms wait."""
    scope = Scope(graph)
    for node in [n for n in graph.nodes if n.target is HEAD_GRADIENT]:
        _scale(graph, node, scope)


def _order(node: Node) -> list[int] | None:
    """How ``node``, a rotation, is turned to have heads before positions; None where the op cannot
    take it."""
    _, cos, sin, distance, paired, _, _, dtype = node.args
    x = _given(node)
    shape, width = fake(x).shape, fake(cos).shape[-1] * (2 if paired else 1)
    if len(shape) != 4 or width != shape[3] or distance not in (1, width // 2):
        return None
    if fake(x).dtype not in HALF or (dtype != fake(x).dtype and _norm_of(node) is None):
        return None
    for heads, order in ((1, [0, 1, 2, 3]), (2, _TURN)):
        known = isinstance(shape[heads], int) and isinstance(shape[3], int)
        if known and all(_of_positions(fake(t), shape, heads) for t in (cos, sin)):
            return order
    return None


def _given(node: Node) -> Node:
    """What ``node`` rotates; under autocast that is widened before."""
    x = node.args[0]
    return x.args[0] if is_cast(x) and fake(x.args[0]).dtype in HALF else x


def _of_positions(table: Tensor, shape: torch.Size, heads: int) -> bool:
    """Has ``table`` a row for each position, the same for all of the dimension ``heads``?"""
    sizes = (*[1] * (4 - table.dim()), *table.shape)
    batch = same(sizes[0], 1) or same(sizes[0], shape[0])
    whole = same(sizes[heads], 1) and same(sizes[3 - heads], shape[3 - heads])
    return batch and whole


def _norm_of(node: Node) -> tuple[Node, float] | None:
    """The gradient of a norm that alone reads ``node``, which may be turned, and the norm's eps."""
    dy = node
    while len(dy.users) == 1:
        (user,) = dy.users
        if not (is_cast(user) or _turns(user)):
            break
        dy = user
    if len(dy.users) != 1 or next(iter(dy.users)).target is not rms_norm_backward:
        return None
    (backward,) = dy.users
    _, z, _, rstd, needs = backward.args
    norm = rstd.args[0] if rstd.target is operator.getitem else rstd
    read = {user.args[1] for user in backward.users}
    if norm.target is not rms_norm or norm.args[0] is not z or not (needs[0] and 0 in read):
        return None
    if not same(fake(z).shape, fake(dy).shape) or fake(z).dtype not in HALF:
        return None
    return backward, norm.args[2]


def _rewrite(graph: Graph, node: Node, order: list[int]) -> bool:
    """Put the op in the place of ``node``, and of the norm's gradient that reads it. False, and the
    graph is as it was, if the result is laid out otherwise."""
    _, cos, sin, distance, paired, inverse, _, _ = node.args
    x, last, eps = _given(node), node, 0.0
    z, weight, wanted, results = None, None, False, {0: node}
    heads_first = order != _TURN
    if (found := _norm_of(node)) is not None:
        last, eps = found
        dy, z, weight, _, needs = last.args
        wanted = weight is not None and needs[1]
        results = {user.args[1]: user for user in last.users}
        heads_first ^= _turned(dy, node)
    put = Put(graph, like=last)
    with graph.inserting_before(last):
        sizes = [put.sizes(x)[i] for i in order]
    given = (x, cos, sin, z, order, heads_first)
    x, cos, sin, z = splice(graph, last, _heads_first, given, like=last)
    with graph.inserting_before(last):
        form = (None, eps, distance, paired, inverse, wanted)
        new = put(HEAD_GRADIENT, x, cos, sin, z, weight, *form)
        rows = put(operator.getitem, new, 0)
        by_token = put(aten.view.default, rows, [sizes[i] for i in _TURN])
        by_head = put(aten.permute.default, by_token, _TURN)
        dweight = put(operator.getitem, new, 2)
    mine = by_head if heads_first else by_token
    fits = _fit(mine, by_token, results[0])
    if fits:
        for user in list(results[0].users):
            user.replace_input_with(results[0], mine)
            if mine is by_head and _turns(user):
                user.replace_all_uses_with(by_token)
        if wanted and 1 in results:
            results[1].replace_all_uses_with(dweight)
    prune([dweight, *by_head.users, by_head, by_token, *results.values(), last])
    return fits


def _fit(mine: Node, by_token: Node, theirs: Node) -> bool:
    """May ``mine`` take the place of ``theirs``: is it laid out alike, or do all readers of that
    want the view of rows ``by_token``?"""
    if fake(mine).dtype != fake(theirs).dtype:
        return False
    alike = laid_out_alike(fake(mine), fake(theirs))
    return alike or (mine is not by_token and all(map(_turns, theirs.users)))


def _turns(user: Node) -> bool:
    return user.target is aten.permute.default and list(user.args[1]) == _TURN


def _turned(node: Node, source: Node) -> bool:
    """Is ``node`` what ``source`` is, turned? Only casts and turns lie between them."""
    turned = False
    while node is not source:
        turned ^= _turns(node)
        node = node.args[0]
    return turned


def _heads_first(
    x: Tensor, cos: Tensor, sin: Tensor, z: Tensor | None, order: list[int], z_is_so: bool
) -> tuple[Tensor | None, ...]:
    tables = [t.view(*[1] * (4 - t.dim()), *t.shape) for t in (cos, sin)]
    if z is not None and not z_is_so:
        z = z.permute(_TURN)
    return *(t.permute(order) for t in (x, *tables)), z


def _scale(graph: Graph, node: Node, scope: Scope) -> None:
    """Let ``node`` make what reads its rows times a factor of each."""
    rows = next((user for user in node.users if user.args[1] == 0), None)
    if rows is None or node.args[5] is not None:
        return
    b, t, width = fake(rows).shape
    _, users = readers(rows, lambda n: renames_or_casts(n) or n.target is aten.clone.default)
    for mul in users:
        factors = [a for a in mul.all_input_nodes if same(fake(a).shape, (b * t, 1))]
        if mul.target is not aten.mul.Tensor or len(factors) != 1:
            continue
        casts = [user for user in mul.users if is_cast(user)]
        scaled = casts[0] if len(mul.users) == len(casts) == 1 else mul
        wide = statistics_dtype(fake(rows).dtype)
        if factors[0] not in scope.forward or fake(factors[0]).dtype != wide:
            continue
        if fake(scaled).dtype == fake(rows).dtype and same(fake(scaled).shape, (b * t, width)):
            put = Put(graph, like=node)
            node.update_arg(5, factors[0])
            settle(factors)
            node.meta["val"] = HEAD_GRADIENT(*map(fake, node.args))
            with graph.inserting_before(rows.next):
                made = put(operator.getitem, node, 1)
                scaled.replace_all_uses_with(put.reshape(made, [-1, width]))
            prune([scaled])
            return
