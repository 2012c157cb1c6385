# SPDX-License-Identifier: Apache-2.0
"""Cross entropies of rows of logits that lie otherwise than the LM head makes them become ones of
all rows, as it makes them.

Before (logits z (B, T, V))::

    loss = F.cross_entropy(z[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1))
    loss = F.cross_entropy(z.transpose(1, 2), labels)

After::

    loss = F.cross_entropy(z.flatten(0, -2), F.pad(labels (B, T - 1), (0, 1), value=ignored))
    loss = F.cross_entropy(z.flatten(0, -2), labels.flatten())

Why it is valid: a row that is ignored adds nothing to a sum or to how many rows a mean is over, and
has no gradient. Without reduction, its zero is cut off again. Which dimension holds the classes
says nothing of the loss of a row.

What it enables: rule R7. The log-sum-exps are of the rows that the head makes, none of its logits
is copied, and their gradient is made a slice of the vocabulary at a time.

Leaves alone, silently, for nothing is lost that was there: class weights, probabilities, an
``ignore_index`` that is no literal; other slices; what is changed in place between; logits whose
rows without the last something else reads; sequences of unknown length without their last; rows of
float16 that are left out, whose logits may be infinite.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from coda_inductor.matching import Hazards, bodies, named, normalize, target_name, value
from coda_inductor.record import Record

_OPTIONS: dict[str, Any] = {
    "weight": None, "size_average": None, "ignore_index": -100, "reduce": None,
    "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip


def whole_losses(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    gm = graph.owning_module
    assert isinstance(gm, GraphModule), "Dynamo's graph has an owner"
    if not record.enabled("cross_entropy"):
        return
    for body in bodies(gm):
        found = [n for n in body.graph.nodes if target_name(n) == "cross_entropy"]
        hazards = Hazards(body.graph)
        for node in found:
            given = named(node, "input", "target", *_OPTIONS, **_OPTIONS)
            if given is None or not _of_classes(given):
                continue
            logits, chain = _classes_second(given["input"]), ()
            if logits is None:
                logits, chain = _without_last_row(given)
            if logits is not None and not hazards.between((given["input"], *chain, node)):
                _replace(node, given, logits, chain)
        if found:
            body.module.recompile()


def _of_classes(given: dict[str, Any]) -> bool:
    """Are the targets classes, and the options numbers, without weights?"""
    logits, target = value(given["input"]), value(given["target"])
    if not all(hasattr(t, "fake_mode") for t in (logits, target)):
        return False
    plain = all(given[key] is None for key in ("weight", "size_average", "reduce"))
    return plain and isinstance(given["ignore_index"], int) and target.dtype == torch.int64


def _classes_second(node: Node) -> Node | None:
    """What ``node`` (B, V, T, ...) turns, (B, T, ..., V), if it is that."""
    source, rank = node.args[0] if node.args else None, value(node).dim()
    if not isinstance(source, Node) or rank < 3:
        return None
    order, name = list(range(rank)), target_name(node)
    if name == "permute":
        dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    elif name in ("transpose", "swapaxes") and len(node.args) == 3:
        i, j = node.args[1:]
        if not all(isinstance(d, int) for d in (i, j)):
            return None
        order[i], order[j] = order[j], order[i]
        dims = order
    else:
        return None
    if not all(isinstance(d, int) for d in dims) or node.kwargs:
        return None
    return source if [d % rank for d in dims] == [0, rank - 1, *range(1, rank - 1)] else None


def _without_last_row(given: dict[str, Any]) -> tuple[Node | None, tuple[Node, ...]]:
    """The logits (B, T, V) of which the loss reads all rows but the last of each sequence, and the
    nodes between them, first the slice; None if it is no such loss."""
    node: Node = given["input"]
    chain: tuple[Node, ...] = ()
    rows, target = value(node), value(given["target"])
    if rows.dim() != 2 or target.dim() != 1:
        return None, ()
    while len(node.users) == 1 and isinstance(node.args[0] if node.args else None, Node):
        chain, source, name = (node, *chain), node.args[0], target_name(node)
        if name == "getitem":
            logits = value(source)
            cut = isinstance(logits, torch.Tensor) and logits.dim() == 3
            if not cut or not _all_but_last(node.args[1]):
                return None, ()
            known = all(isinstance(size, int) for size in (*logits.shape, *target.shape))
            apart = known and rows.shape[1] == logits.shape[2]
            return (source, chain) if apart and not _may_overflow(source) else (None, ())
        canon = normalize(node)
        viewed = canon is not None and canon.op in ("view", "flatten")
        if not viewed and not (name in _COPIES and _copied(source, node)):
            break
        node = source
    return None, ()


def _may_overflow(logits: Node) -> bool:
    """Are ``logits`` of float16, or were they? Infinite ones of rows that nobody reads would be
    NaNs in the gradient."""
    while (canon := normalize(logits)) is not None and canon.op == "cast":
        logits = canon.args[0]
    return value(logits).dtype == torch.float16


#: Methods that copy: into another layout or a wider dtype.
_COPIES = ("contiguous", "to", "float", "double", "type", "type_as")


def _copied(source: Node, copy: Node) -> bool:
    """Has ``copy`` the values of ``source``, in a dtype that holds them, on one device?"""
    before, after = value(source), value(copy)
    tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    if not tensors or before.device != after.device or not before.is_floating_point():
        return False
    return torch.promote_types(before.dtype, after.dtype) == after.dtype


def _all_but_last(index: Any) -> bool:
    """Does ``index`` take of (B, T, V) all positions but the last?"""
    if not isinstance(index, tuple):
        return False
    whole, cut = slice(None), (slice(None, -1), slice(0, -1))
    index = tuple(slice(None) if i == slice(0, None) else i for i in index)
    ways = [(whole, c) for c in cut] + [
        (*w, c, whole) for w in ((whole,), (Ellipsis,)) for c in cut
    ]
    return any(index == way for way in ways)


def _replace(node: Node, given: dict[str, Any], logits: Node, chain: tuple[Node, ...]) -> None:
    """Put the loss of all rows of ``logits`` in the place of ``node``; ``chain``: the slice that
    leaves the last row of each sequence out, if one does, and what follows it."""
    graph = node.graph

    def put(target: Any, *args: Any, **kwargs: Any) -> Node:
        make = graph.call_method if isinstance(target, str) else graph.call_function
        made = make(target, args, kwargs)
        first, *others = torch.fx.node.map_arg(args, value)
        call = getattr(type(first), target) if isinstance(target, str) else target
        of = call(first, *others, **torch.fx.node.map_arg(kwargs, value))
        made.meta = {**node.meta, "example_value": of}
        return made

    target, ignored = given["target"], given["ignore_index"]
    dtype = value(node).dtype  # autocast widens the logits, which nothing below is recorded under
    with graph.inserting_before(node), value(logits).fake_mode:
        if value(logits).dtype != dtype:
            logits = put("to", logits, dtype)
        classes = target
        if chain:
            rows = value(chain[0]).shape[:2]
            classes = put(F.pad, put("view", target, *rows), (0, 1), "constant", ignored)
        how = {key: given[key] for key in ("ignore_index", "reduction", "label_smoothing")}
        found = put(F.cross_entropy, put("flatten", logits, 0, -2), put("flatten", classes), **how)
        if given["reduction"] == "none":
            found = put("view_as", found, classes)
            if chain:
                found = put("flatten", put(operator.getitem, found, (Ellipsis, slice(None, -1))))
    node.replace_all_uses_with(found)
    graph.erase_node(node)
    for dead in reversed(chain):
        if not dead.users:
            graph.erase_node(dead)
