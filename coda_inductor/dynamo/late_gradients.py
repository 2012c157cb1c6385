# SPDX-License-Identifier: Apache-2.0
"""If the user computes no gradient of returned logits, no gradient of zeros is created for them.

A causal LM returns its logits together with the loss. Its compiled backward pass then takes a
gradient for both. If the user calls backward only on the loss, autograd passes zeros for the
logits: a tensor as large as the logits, which is written, added and read for nothing.

Before::

    logits = linear(h, W, b); loss = f(logits); return loss, logits

After::

    logits = linear(h, W, b); loss = f(logits); return loss, logits.detach(), h
    # around the compiled graph: logits = _Late.apply(logits, h, W, b, 0.0)

Why it is valid: a gradient g of the returned logits adds g @ W to the gradient of h, g.T @ h to the
gradient of W and g.sum(0) to the gradient of b. ``_Late`` does this if its backward is called; the
gradient of h goes on through the compiled graph. For soft-capped logits, c * tanh(linear(h, W, b) /
c), g is first multiplied by 1 - (logits / c)^2.

Refuses, silently, because the graph does not get worse: outputs that are not a linear layer of
graph inputs (soft-capped or not), have no other reader, are changed in place, or have less than
``LEAST_BYTES``; outputs if a view of them is returned too, which needs its gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.compat import saved_tensors, storage, version
from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments, bytes_of, fake, plain
from coda_inductor.graph.read import op_name
from coda_inductor.graph.walk import closure
from coda_inductor.matching import Idiom, changes, first_match
from coda_inductor.record import Record

#: Less is not worth two products of their own where a user does compute a gradient of the logits.
LEAST_BYTES = 2**26

Compiled = Callable[..., Any]


class _Late(torch.autograd.Function):
    """Makes detached ``logits``, ``h @ w.T + b`` capped by ``cap`` if not 0, differentiable."""

    @staticmethod
    def forward(ctx, logits: Tensor, h: Tensor, w: Tensor, b: Tensor | None, cap: float) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, w, b, logits if cap else None)
        ctx.cap = cap
        return logits.detach()  # shares memory and version, so that changes are detected

    @staticmethod
    def backward(ctx, g: Tensor | None):
        if g is None:
            return None, None, None, None, None
        h, w, b, capped = ctx.saved_tensors
        if capped is not None:
            wide = torch.promote_types(capped.dtype, torch.float32)
            g = (g.to(wide) * (1 - (capped.to(wide) / ctx.cap).square())).to(g.dtype)
        rows = g.reshape(-1, g.shape[-1])
        dh = dw = db = None
        if ctx.needs_input_grad[1]:
            dh = (rows @ w.to(g.dtype)).reshape(h.shape).to(h.dtype)
        if ctx.needs_input_grad[2]:
            dw = (rows.t() @ h.reshape(-1, h.shape[-1]).to(g.dtype)).to(w.dtype)
        if ctx.needs_input_grad[3]:
            db = rows.sum(0).to(b.dtype)
        return None, dh, dw, db, None


@functools.cache
def _heads() -> tuple[Idiom, ...]:
    def linear(h, w, b):
        return F.linear(h, w, b)

    def soft_capped(h, w, b, cap):
        return torch.tanh(linear(h, w, b) / cap) * cap

    return Idiom(soft_capped), Idiom(linear)


def separate(graph: Graph, record: Record) -> None:
    """Detach returned logits of ``graph``, in place. The record gets a wrapper for the compiled
    graph, so that inputs and results do not change for the caller."""
    output = graph.output_node()
    results = list(output.args[0])
    inputs = list(graph.find_nodes(op="placeholder"))
    heads: list[tuple[int, int, int | None, float]] = []
    changed = changes(graph)
    for i, logits in enumerate(results):
        (value,) = plain(logits) or (None,)
        large = value is not None and value.requires_grad and bytes_of(value) >= LEAST_BYTES
        if not isinstance(logits, Node) or not large or _shared(logits, results):
            continue
        head = _head(logits)
        if head is None or len(logits.users) < 2:
            continue
        h, w, b, cap = head
        parameters = {w} if b is None else {w, b}
        ends = {h, *parameters}
        if not parameters <= set(inputs) or changed & _between(logits, ends):
            continue
        results[i] = Put(logits, output)("detach", logits)
        results.append(h)
        heads.append((i, inputs.index(w), None if b is None else inputs.index(b), cap))
    output.args = (tuple(results),)
    if heads:
        record.wrappers.append(lambda compiled: _wrap(compiled, heads))


def _between(node: Node, ends: set[Node]) -> set[Node]:
    return ends.union(closure([node], lambda n: () if n in ends else n.all_input_nodes))


def _shared(logits: Node, results: list[Any]) -> bool:
    """Does another result share the memory of ``logits``? AOTAutograd recreates a returned view
    from its base, and Inductor treats the base and the detached result as one output."""
    values = [fake(r) for r in results if isinstance(r, Node)]
    storages = [storage(t) for t in values if isinstance(t, Tensor)]
    return storages.count(storage(fake(logits))) > 1


def _head(logits: Node) -> tuple[Node, Node, Node | None, float] | None:
    """(h, w, b, cap) if ``logits`` are ``linear(h, w, b)``, soft-capped or not; or None."""
    match = first_match(_heads(), logits)
    layer = None if match is None else next(n for n in match.nodes if op_name(n) == "linear")
    if match is None or layer is None or any(cast > layer for cast in match.casts):
        return None
    cap = match.bound.get("cap", 0.0)
    h, w, b = (arguments(layer)[name] for name in ("input", "weight", "bias"))
    capped = isinstance(cap, (int, float)) and bool(cap)
    nodes_only = all(isinstance(n, Node | None) for n in (h, w, b))
    return (h, w, b, float(cap)) if nodes_only and capped == ("cap" in match.bound) else None


def _wrap(compiled: Compiled, heads: list[tuple[int, int, int | None, float]]) -> Compiled:
    def call(*inputs: Any) -> Any:
        results = list(compiled(*inputs))
        extra = results[len(results) - len(heads) :]
        del results[len(results) - len(heads) :]
        if torch.is_grad_enabled():
            for (i, weight, bias, cap), h in zip(heads, extra, strict=True):
                _watch(results, i)
                b = None if bias is None else inputs[bias]
                results[i] = _Late.apply(results[i], h, inputs[weight], b, cap)
        return tuple(results)

    return call


def _watch(results: list[Any], i: int) -> None:
    """Raise if the user changed the logits before a backward pass that reads them. If the loss does
    not need them, a change is no error, as with torch.compile."""
    holder = [results[i]]  # the backward pass keeps them as long anyway
    before = version(holder[0])

    def check(_gradients: tuple[Any, ...]) -> None:
        changed = bool(holder) and version(logits := holder.pop()) != before
        if changed and storage(logits) in map(storage, saved_tensors()):  # of this prehook's node
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: output {i} of the compiled model; change a clone of it"
            )

    for node in {r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn is not None}:
        node.register_prehook(check)
