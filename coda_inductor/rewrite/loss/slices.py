# SPDX-License-Identifier: Apache-2.0
"""Compute and use the gradient of a model's logits one slice of the vocabulary at a time.

Before (logits (M, V) = h @ W.T, of which the forward pass keeps lse (M,), rule R7)::

    dlogits = cross_entropy_backward(dloss, logits, target, lse, number)     M x V
    dlogits += a * exp(logits - b)      if there is a z-loss
    dlogits += entropy_backward(e, logits, lse, H)        if an entropy has a gradient
    dz = dlogits, or dlogits * (1 - (logits / c) ** 2) where logits = c * tanh(z / c)
    dz *= f                             if the head's logits have a factor
    dh = dz @ W;  dW = dz.T @ h;  db = dz.sum(0)

After::

    dh, dW, db = linear_cross_entropy_backward(
        dloss', logits, target, lse, number, W, h, a', e', H, c)
    where dloss' = f * dloss, e' = f * e, a' = f * a * exp(lse - b), f * a for b = lse

Why it is valid: column j of dz needs only column j of the logits and one value per row, dh is the
sum of the products of the slices, and each slice gives its own rows of dW and elements of db. dz is
linear in dloss, a and e, so a factor can be applied to these.

Why it pays: a second tensor of the logits' size is the memory peak of a training step.

Refuses: rewrites that save no memory (``no_gain``), for logits of less than two slices, and for
logits that are no output, which Inductor overwrites with their gradient; a gradient with other
readers; ops between it and the linear layer that ``logit_gradients`` does not read.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import functorch_config
from coda_inductor.graph.edit import Put, prune, reorder
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import (
    arguments,
    aten,
    axis_of,
    bytes_of,
    fake,
    is_transpose,
    label,
    may_view,
    renames_or_casts,
)
from coda_inductor.graph.sides import is_tangent
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, readers
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.loss.logit_gradients import through_cap, through_factor, with_row_terms
from coda_inductor.rewrite.loss.rounded import kept
from coda_inductor.semantic import loss


def slice_loss_gradient(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every ``cross_entropy_backward`` of ``graph``, in place."""
    name = "cross_entropy_backward"
    for node in [n for n in graph.nodes if n.target is loss.cross_entropy_backward]:
        off = not record.enabled(name)
        why = refuse("disabled", f"options['disable'] names {name}") if off else _slice(node)
        if why is not None:
            record.refuse(name, node, why)
        else:
            record.fire(name)


def _slice(node: Node) -> Refusal | None:
    kwargs = arguments(node)
    read = kwargs["logits"]
    kwargs["logits"] = kept(read)
    logits = fake(kwargs["logits"])
    columns = logits.shape[-1]
    gradient, penalty, spread = with_row_terms(node, read)
    gradient, cap = through_cap(gradient, read)
    gradient, factor = through_factor(gradient)
    names, users = readers(gradient, renames_or_casts)
    transposed = [u for u in users if is_transpose(u)]
    products = [u for u in users if u not in transposed] + [u for t in transposed for u in t.users]
    factors = {p: gemm_inputs(p) for p in products if p.target is aten.mm.default}
    dgrads = [p for p, (left, _) in factors.items() if left in names]
    wgrads = [p for p, (left, _) in factors.items() if left in transposed]
    sums = [p for p in products if _is_bias_gradient(p, columns)]
    for product in products:
        if product not in (*dgrads, *wgrads, *sums):
            returned = any(is_tangent(base(n)) for n in product.all_input_nodes)
            reader = "the gradient of returned logits is added to it"
            return refuse("logits-read", reader if returned else f"{label(product)} reads it too")
    if max(len(dgrads), len(wgrads), len(sums)) > 1 or not (dgrads or wgrads):
        return refuse("idiom-form", "it is not the gradient of one linear layer")
    lefts = [(fake(factors[p][0]).shape, p in dgrads) for p in (*dgrads, *wgrads)]
    if not all(same(shape[is_dgrad], columns) for shape, is_dgrad in lefts):
        return refuse("idiom-form", "its linear layer computes several rows of logits at once")
    weight, x = (factors[gemms[0]][1] if gemms else None for gemms in (dgrads, wgrads))
    dtypes = {logits.dtype, *(fake(t).dtype for t in (weight, x) if t is not None)}
    if len(dtypes) != 1:
        differ = ", ".join(sorted(map(str, dtypes)))
        return refuse("logits-dtypes", f"logits, weight and operand differ in dtype ({differ})")
    if why := no_gain(kwargs["logits"], dgrads, wgrads):
        return refuse("no-gain", why)
    last = max(n for n in (node, weight, x, *(penalty or ()), *(spread or ())) if n is not None)
    put = Put(node, last.next)
    dlse = None if penalty is None else _times_softmax(put, kwargs["lse"], *penalty)
    wide = fake(kwargs["lse"]).dtype
    dloss, *vectors = (kwargs[name] for name in ("dloss", "logits", "target", "lse", "number"))
    options = [kwargs[name] for name in ("ignore_index", "label_smoothing", "reduction")]
    rows = [put.cast(put.reshape(n, [-1]), wide) for n in spread or ()]
    dentropy, entropies = rows or (None, None)
    if factor != 1:
        dloss = put.mul(put.cast(dloss, wide), factor)
        dlse = None if dlse is None else put.mul(dlse, factor)
        dentropy = None if dentropy is None else put.mul(dentropy, factor)
    args = (dloss, *vectors, weight, x, dlse, dentropy, entropies, *options, cap, bool(sums))
    call = put(torch.ops.coda_inductor.linear_cross_entropy_backward.default, *args)
    gradients = enumerate((dgrads, wgrads, sums))
    results = {gemms[0]: put(operator.getitem, call, i) for i, gemms in gradients if gemms}
    for bias in sums:
        shape = [1] * (fake(bias).dim() - 1) + [-1]
        viewed = put(aten.view.default, results[bias], shape)
        results[bias] = put.cast(viewed, fake(bias).dtype)
    for old, new in results.items():
        old.replace_all_uses_with(new)
    reorder(list(results.values()))
    prune(list(results))
    return None


def no_gain(logits: Node, dgrads: list[Node], wgrads: list[Node]) -> str:
    """The reason why slices do not lower the peak of the head's backward pass; empty if they do.

    Logits that are an output stay, beside a gradient of their size. All others end with the kernel
    that makes their gradient, and if AOTAutograd donates saved tensors to the backward pass, as it
    does by default, that kernel overwrites them. Slices need all logits to the end.
    """
    size, dx = bytes_of(logits), bytes_of(*dgrads)
    if size < 2 * loss.SLICE_BYTES:
        took, least = size / 2**20, 2 * loss.SLICE_BYTES / 2**20
        return f"its logits take {took:.3g} MiB, and slices lower the peak from {least:.0f} MiB on"
    results = dx + bytes_of(*wgrads)
    if any(n.op == "output" for n in readers(base(logits, may_view), may_view)[1]):
        whole = 2 * size + results
    elif functorch_config.donated_buffer:
        whole = size + results
    else:
        whole = max(2 * size, size + results)
    wide = 4 * dx // fake(logits).element_size()  # of the sum over slices
    if whole <= size + loss.SLICE_BYTES + wide + results:
        return "its logits are no output, so that their gradient can take their place"
    return ""


def _times_softmax(put: Put, lse: Node, a: Node, b: Node) -> Node:
    """``a * exp(lse - b)`` (M,), for b of (..., 1): its product with the softmax is ``a *
    exp(logits - b)``. It is ``a`` if b is a log-sum-exp of the logits too."""
    dtype = fake(lse).dtype
    a, b = (put.cast(put.reshape(n, [-1]), dtype) for n in (a, b))
    return put.mul(a, put(aten.exp.default, put(aten.sub.Tensor, lse, b)))


def _is_bias_gradient(node: Node, columns: Any) -> bool:
    if node.target is not aten.sum.dim_IntList or axis_of(node) != "col":
        return False
    return same(fake(node.all_input_nodes[0]).shape[-1], columns)
