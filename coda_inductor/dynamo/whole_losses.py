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

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.dynamo.nodes import Put
from coda_inductor.graph.read import Call, read
from coda_inductor.graph.walk import base
from coda_inductor.matching import Hazards, bodies, is_cast, is_view, normalize, target_name, value
from coda_inductor.record import Record


def whole_losses(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    if not record.enabled("cross_entropy"):
        return
    for body in bodies(graph):
        found = [n for n in body.graph.nodes if target_name(n) == "cross_entropy"]
        hazards = Hazards(body.graph)
        for node in found:
            given = read(node)
            if given is None or not _of_classes(given):
                continue
            logits, chain = _classes_second(given["input"]), ()
            if logits is None:
                logits, chain = _without_last_row(given)
            if logits is not None and not hazards.between((given["input"], *chain, node)):
                _replace(node, given, logits, chain)


def _of_classes(given: Call) -> bool:
    """Are the targets classes, and the options numbers, without weights?"""
    logits, target = value(given["input"]), value(given["target"])
    if not all(hasattr(t, "fake_mode") for t in (logits, target)):
        return False
    plain = all(given[key] is None for key in ("weight", "size_average", "reduce"))
    return plain and isinstance(given["ignore_index"], int) and target.dtype == torch.int64


def _classes_second(node: Node) -> Node | None:
    """What ``node`` (B, V, T, ...) turns, (B, T, ..., V), if it is that."""
    source = next(iter(node.all_input_nodes), None)
    logits = value(source)
    turns = isinstance(logits, torch.Tensor) and logits.dim() > 2
    return source if turns and is_view(node, logits.movedim(-1, 1)) else None


def _without_last_row(given: Call) -> tuple[Node | None, tuple[Node, ...]]:
    """The logits (B, T, V) of which the loss reads all rows but the last of each sequence, and the
    nodes between them, first the slice; None if it is no such loss."""
    node: Node = given["input"]
    chain: tuple[Node, ...] = ()
    rows, target = value(node), value(given["target"])
    if rows.dim() != 2 or target.dim() != 1:
        return None, ()
    while len(node.users) == 1 and node.all_input_nodes:
        chain, source = (node, *chain), node.all_input_nodes[0]
        logits = value(source)
        if isinstance(logits, torch.Tensor) and logits.dim() == 3 and is_view(node, logits[:, :-1]):
            known = all(isinstance(size, int) for size in (*logits.shape, *target.shape))
            apart = known and rows.shape[1] == logits.shape[2]
            # Infinite logits of rows that nobody reads would be NaNs in the gradient.
            overflows = value(base(source, is_cast)).dtype == torch.float16
            return (source, chain) if apart and not overflows else (None, ())
        canon = normalize(node)
        viewed = canon is not None and canon.op in ("view", "flatten")
        if not viewed and not (target_name(node) in _COPIES and _copied(source, node)):
            break
        node = source
    return None, ()


#: Methods that copy: into another layout or a wider dtype.
_COPIES = ("contiguous", "to", "float", "double", "type", "type_as")


def _copied(source: Node, copy: Node) -> bool:
    """Has ``copy`` the values of ``source``, in a dtype that holds them, on one device?"""
    before, after = value(source), value(copy)
    tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    if not tensors or before.device != after.device or not before.is_floating_point():
        return False
    return torch.promote_types(before.dtype, after.dtype) == after.dtype


def _replace(node: Node, given: Call, logits: Node, chain: tuple[Node, ...]) -> None:
    """Put the loss of all rows of ``logits`` in the place of ``node``; ``chain``: the slice that
    leaves the last row of each sequence out, if one does, and what follows it."""
    put = Put(node)
    target, ignored = given["target"], given["ignore_index"]
    dtype = value(node).dtype  # autocast widens the logits, which nothing below is recorded under
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
    node.graph.erase_node(node)
    for dead in reversed(chain):
        if not dead.users:
            dead.graph.erase_node(dead)
