"""The gradient of a language model's logits is used as it is made, a slice of the vocabulary at a
time.

Before (logits (M, V) = h @ W.T, of which the forward pass keeps lse (M,), rule R7)::

    dlogits = cross_entropy_backward(dloss, logits, target, lse, number)     M x V
    dh = dlogits @ W;  dW = dlogits.T @ h

After::

    dh, dW = linear_cross_entropy_backward(dloss, logits, target, lse, number, W, h)

Why it is valid: column j of dlogits needs column j of the logits and values a row only, dh is the
sum of the products of the slices, and each slice makes rows of dW of its own.

Why it pays: a second tensor of the logits' size is the peak of a training step.

Refuses logits of less than ``runtime.loss.SLICE_BYTES`` twice; a gradient that something else reads
(a soft cap, a bias, a z-loss); one that is not behind a reshaping alone.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from coda_inductor.graph import (
    ALIASES,
    Put,
    aten,
    fake,
    is_cast,
    is_transpose,
    prune,
    readers,
    settle,
)
from coda_inductor.runtime import loss
from coda_inductor.runtime.config import hint
from coda_inductor.semantic_loss import cross_entropy_backward


def slice_loss_gradient(graph: Graph) -> tuple[int, list[str]]:
    """Apply the rewrite to every ``cross_entropy_backward``; returns how often, and a line for each
    near miss."""
    done, refused = 0, []
    for node in [n for n in graph.nodes if n.target is cross_entropy_backward]:
        reason = _slice(graph, node)
        if reason is None:
            done += 1
        else:
            refused.append(f"cross_entropy_backward at {node.name}: {reason}")
    return done, refused


def _slice(graph: Graph, node: Node) -> str | None:
    logits = fake(node.args[1])
    size = hint(logits.numel()) * logits.element_size()
    if size < 2 * loss.SLICE_BYTES:
        return f"its logits take {size / 2**20:.0f} MiB only"
    names, users = readers(node, through=lambda u: u.target in ALIASES or is_cast(u))
    turned = [u for u in users if is_transpose(u)]
    products = [u for u in users if u not in turned] + [u for t in turned for u in t.users]
    dgrads = [p for p in products if p.target is aten.mm.default and p.args[0] in names]
    wgrads = [p for p in products if p.target is aten.mm.default and p.args[0] in turned]
    for product in products:
        if product not in dgrads and product not in wgrads:
            return f"{product.name} ({product.target}) reads it too"
    if len(dgrads) > 1 or len(wgrads) > 1 or not products:
        return "it is not the gradient of one linear layer"
    weight = dgrads[0].args[1] if dgrads else None
    x = wgrads[0].args[1] if wgrads else None
    dtypes = {fake(t).dtype for t in (weight, x, node.args[1]) if t is not None}
    if len(dtypes) != 1:
        return f"logits, weight and operand differ in dtype ({', '.join(sorted(map(str, dtypes)))})"
    behind = max(n for n in (node, weight, x) if n is not None)
    put = Put(graph, like=node)
    with graph.inserting_before(behind.next):
        args = (*node.args[:5], weight, x, *node.args[5:])
        call = put(torch.ops.coda_inductor.linear_cross_entropy_backward.default, *args)
        outputs = [put(operator.getitem, call, i) for i in range(2)]
    for product, output in zip(dgrads + wgrads, outputs if dgrads else outputs[1:], strict=False):
        product.replace_all_uses_with(output)
    settle(outputs)
    prune([*dgrads, *wgrads])
    return None
