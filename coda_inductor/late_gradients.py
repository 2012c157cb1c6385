"""A gradient of returned logits that never comes is never made up.

A causal LM returns its logits beside the loss. Compiled, its backward pass then takes a gradient
for both, and where the user only goes back from the loss, autograd fills one with zeros: as large
as the logits, written, added and read for nothing.

Before::

    logits = linear(h, W); loss = f(logits); return loss, logits

After::

    logits = linear(h, W); loss = f(logits); return loss, logits.detach(), h
    # around the compiled graph: logits = _Late.apply(logits, h, W)

Why it is valid: a gradient g of the returned logits adds g @ W to the gradient of h and g.T @ h to
that of W, which is what ``_Late`` does, if it is ever called; h goes through the compiled graph.

Refuses, silently, for nothing is lost: outputs that are no bare linear layer of a graph input, that
nothing else in the graph reads, that are changed in place, or that take less than ``LEAST_BYTES``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from coda_inductor.matching import mutates, value, written
from coda_inductor.runtime.config import hint
from coda_inductor.runtime.loss import SLICE_BYTES

LEAST_BYTES = 2 * SLICE_BYTES

Compiled = Callable[..., Any]


class _Late(torch.autograd.Function):
    """Returns ``logits``, which are ``h @ w.T`` and have no gradient yet, with one."""

    @staticmethod
    def forward(ctx, logits: Tensor, h: Tensor, w: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, w)
        return logits.detach()  # shares memory and version, so that changing it is noticed

    @staticmethod
    def backward(ctx, g: Tensor | None):
        if g is None:
            return None, None, None
        h, w = ctx.saved_tensors
        rows = g.reshape(-1, g.shape[-1])
        dh = dw = None
        if ctx.needs_input_grad[1]:
            dh = (rows @ w.to(g.dtype)).reshape(h.shape).to(h.dtype)
        if ctx.needs_input_grad[2]:
            dw = (rows.t() @ h.reshape(-1, h.shape[-1]).to(g.dtype)).to(w.dtype)
        return None, dh, dw


def separate(gm: GraphModule) -> Callable[[Compiled], Compiled]:
    """Detach such outputs of ``gm``, in place. Returns what to wrap around the compiled graph, so
    that it takes and returns what it did before."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    results = list(output.args[0])
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    found: list[tuple[int, int]] = []
    changed = {n for node in gm.graph.nodes if mutates(node) for n in written(node)}
    for place, logits in enumerate(results):
        if not isinstance(logits, Node) or results.count(logits) > 1 or not _is_large(logits):
            continue
        arguments = _linear(logits)
        if arguments is None or arguments[1] not in inputs or len(logits.users) < 2:
            continue
        h, w = arguments
        if changed & {logits, h, w}:
            continue
        with gm.graph.inserting_before(output):
            detached = gm.graph.call_method("detach", (logits,))
        detached.meta = {**logits.meta, "example_value": value(logits).detach()}
        results[place] = detached
        results.append(h)
        found.append((place, inputs.index(w)))
    output.args = (tuple(results),)
    gm.recompile()
    return lambda compiled: _wrap(compiled, found) if found else compiled


def _is_large(node: Node) -> bool:
    known = value(node)
    if not isinstance(known, Tensor) or not known.requires_grad:
        return False
    return hint(known.numel()) * known.element_size() >= LEAST_BYTES


def _linear(node: Node) -> tuple[Node, Node] | None:
    """(h, w) of ``F.linear(h, w)`` without a bias, both differentiable or not."""
    if node.op != "call_function" or node.target is not F.linear:
        return None
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
    h, w = named.get("input"), named.get("weight")
    if named.get("bias") is not None or not isinstance(h, Node) or not isinstance(w, Node):
        return None
    return h, w


def _wrap(compiled: Compiled, found: list[tuple[int, int]]) -> Compiled:
    def call(*inputs: Any) -> Any:
        results = list(compiled(*inputs))
        extra = results[len(results) - len(found) :]
        del results[len(results) - len(found) :]
        if torch.is_grad_enabled():
            for (place, weight), h in zip(found, extra, strict=True):
                _watch(results, place)
                results[place] = _Late.apply(results[place], h, inputs[weight])
        return tuple(results)

    return call


def _watch(results: list[Any], place: int) -> None:
    """Going back reads the logits again, which the user holds too: notice if they were changed."""
    kept = [results[place]]  # until then, which is as long as the backward pass keeps them anyway
    version = kept[0]._version

    def check(_gradients: tuple[Any, ...]) -> None:
        if kept and kept.pop()._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: output {place} of the compiled model; change a clone of it"
            )

    for node in {r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn is not None}:
        node.register_prehook(check)
