# SPDX-License-Identifier: Apache-2.0
"""Losses of an LM head's logits become cross entropies of all rows in the head's order.

Before (logits z (B, T, V))::

    loss = F.cross_entropy(z[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1))
    loss = F.cross_entropy(z.transpose(1, 2), labels)
    p = torch.gather(F.log_softmax(z, -1), -1, index)         # DPO; index (..., 1)
    p = torch.gather(z, -1, index) - torch.logsumexp(z, -1, keepdim=True)
    p = torch.gather(z - torch.logsumexp(z, -1, keepdim=True), -1, index)

After::

    loss = F.cross_entropy(z.flatten(0, -2), F.pad(labels (B, T - 1), (0, 1), value=ignored))
    loss = F.cross_entropy(z.flatten(0, -2), labels.flatten())
    p = F.cross_entropy(z.flatten(0, -2), index.flatten(), reduction="none").neg().view_as(index)

Why it is valid: an ignored row adds nothing to a sum or to the row count of a mean, and has no
gradient. Without reduction, the zeros of ignored rows are cut off again. The position of the
classes' dimension does not change the loss of a row. A cross entropy of one class is minus its
log-softmax; for an ``index`` no row is ignored: a negative index remains an error.

What it enables: rule R7. The log-sum-exps belong to rows of the head's result, neither logits nor
their log-softmax are copied, and the gradient takes the logits' place or is computed one slice of
the vocabulary at a time.

Leaves alone, silently, because the graph does not get worse: class weights, probabilities, an
``ignore_index`` that is not a literal; other slices; tensors that are changed in place in between;
logits whose slice without the last row has other readers; a last row of sequences of unknown
length; left-out rows of float16, whose logits may be infinite; log-softmaxes with other readers
than an entropy, or over another dimension; several tokens a row; an index with fewer rows.
"""

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import fake, is_cast, is_view, plain, renames
from coda_inductor.graph.read import Call, called, kind, op_name, read
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, chain, closure
from coda_inductor.matching import Hazards, bodies, normalize, replace
from coda_inductor.matching.normalize import is_last
from coda_inductor.record import Record

#: A target of no class, in 32 bits too.
_NOTHING = -(2**31)
_GATHERS = ("gather", "take_along_dim")
_READ = ("cross_entropy", *_GATHERS, "sub")


def respell_losses(graph: Graph, record: Record) -> None:
    """Apply the rewrites to ``graph`` and its checkpointed regions, in place."""
    for body in bodies(graph):
        hazards = Hazards(body.graph)
        for node in list(body.graph.nodes):
            call = read(node) if op_name(node) in _READ else None
            if call is None:
                continue
            if not record.enabled("cross_entropy"):
                return
            respell = {"cross_entropy": lambda call, _: call.node, "sub": _respell_difference}
            loss = respell.get(call.op, _respell_gather)(call, hazards)
            if (plain_loss := normalize(loss)) is not None:
                _respell(plain_loss, hazards)


def _respell_gather(gather: Call, hazards: Hazards) -> Node | None:
    """Replace a gather of a log-softmax by a cross entropy. Returns it; None for other gathers."""
    node, softmax, index = gather.node, gather["input"], gather["index"]
    difference = called(softmax, "sub")
    sums = chain(difference["other"]) if difference is not None else ()
    if (logits := _under_softmax(gather)) is None or hazards.between((*sums, softmax, node)):
        return None
    return _minus_loss(node, logits, index, fake(softmax).dtype)


def _minus_loss(
    node: Node, logits: Node, index: Node, dtype: torch.dtype, *, minus: bool = True
) -> Node:
    """Replace log-probabilities, of the shape of ``index`` (..., 1) or without the last dimension,
    by minus a loss of all rows; by the loss if they are not log-probabilities but their negatives.
    Returns the loss."""
    put, options = Put(node), {"ignore_index": _NOTHING, "reduction": "none"}
    loss = _all_rows(put, logits, put("flatten", index), dtype, options)
    result = put("view_as", put("neg", loss) if minus else loss, index)
    if fake(node).dim() < fake(index).dim():
        result = put("squeeze", result, -1)
    # Autocast makes the loss float32, but not on every device the log-softmax, and nodes here are
    # recorded without autocast: Put.cast would see nothing to do.
    replace(node, put("to", result, fake(node).dtype))
    return loss


def _respell_difference(difference: Call, hazards: Hazards) -> Node | None:
    """Replace a gathered logit minus its row's log-sum-exp, or the opposite, by a cross entropy.
    Returns it, or None."""
    node, sides = difference.node, (difference["input"], difference["other"])
    if difference.get("alpha") not in (None, 1) or plain(*sides, node) is None:
        return None
    left, right = (base(side, _is_column) for side in sides)
    for picked, total in ((left, right), (right, left)):
        gather, sums = read(picked), normalize(total)
        if sums is None or not sums.op.startswith("logsumexp_"):
            continue
        logits = sums["input"]
        if hazards.between((picked, total, node)):
            return None
        read_here = gather is not None and gather.op in _GATHERS and gather["input"] is logits
        if gather is None or not read_here or not _is_one_a_row(gather, logits):
            continue
        shape, whole = tuple(fake(node).shape), tuple(fake(gather["index"]).shape)
        if same(shape, whole) or same(shape, whole[:-1]):
            dtype, minus = fake(node).dtype, picked is left
            return _minus_loss(node, logits, gather["index"], dtype, minus=minus)
    return None


def _is_one_a_row(gather: Call, source: Node) -> bool:
    tensors = plain(source, gather["index"])
    if tensors is None or not is_last(gather["dim"], source) or gather.get("sparse_grad"):
        return False
    x, index = tensors
    one = x.dim() > 1 and same(tuple(index.shape), (*x.shape[:-1], 1))
    return one and index.dtype == torch.int64 and x.is_floating_point()


def _is_column(node: Any) -> bool:
    if renames(node):
        return True
    tensors = plain(node.args[0]) if op_name(node) in ("getitem", "select") else None
    if tensors is None:
        return False
    (x,) = tensors
    return x.dim() > 0 and same(x.shape[-1:], (1,)) and is_view(node, x.squeeze(-1))


def _under_softmax(gather: Call) -> Node | None:
    """The logits whose log-softmax is gathered, one element per row; None for other gathers."""
    softmax = gather["input"]
    if (logits := _logits_of(softmax)) is None or not _leaves_entropy(gather.node, softmax):
        return None
    tensors = plain(logits, softmax)
    if tensors is None or not _is_one_a_row(gather, softmax):
        return None
    x, rows = tensors
    narrowed = torch.promote_types(x.dtype, rows.dtype) != rows.dtype
    return logits if same(x.shape, rows.shape) and x.is_floating_point() and not narrowed else None


def _logits_of(softmax: Node) -> Node | None:
    """The logits whose log-softmax of rows this is, in one op or as a difference; else None."""
    call = normalize(softmax)
    if call is not None and call.op == "log_softmax_last":
        return call["input"]
    minus = called(softmax, "sub")
    total = minus and normalize(base(minus["other"]))
    if minus is None or total is None or not total.op.startswith("logsumexp_"):
        return None
    tensors = plain(minus["input"], minus["other"])
    if tensors is None or total["input"] is not minus["input"]:
        return None
    x, lse = tensors
    return minus["input"] if same(tuple(lse.shape), (*x.shape[:-1], 1)) else None


def _leaves_entropy(gather: Node, softmax: Node) -> bool:
    others = [user for user in softmax.users if user is not gather]
    steps = closure(others, lambda n: n.users if op_name(n) in ("exp", "neg", "mul") else ())
    sums = [n for n in steps if op_name(n) == "sum"]
    names = [op_name(n) for n in (*steps, *(user for n in sums for user in n.users))]
    expected = {"exp": 1, "mul": 1, "neg": 1, "sum": 1}
    return not others or Counter(names) == expected


def _all_rows(
    put: Put, logits: Node, classes: Node, dtype: torch.dtype, options: dict[str, Any]
) -> Node:
    """The cross entropy of all rows of ``logits`` (..., V), computed in ``dtype``."""
    rows = put("flatten", put.cast(logits, dtype), 0, -2)
    return put(F.cross_entropy, rows, classes, **options)


def _respell(loss: Call, hazards: Hazards) -> None:
    """Replace a loss without the last row of each sequence, or with classes in the second
    dimension, by the loss of all rows, if the targets are classes."""
    tensors, ignored = plain(loss["input"], loss["target"]), loss["ignore_index"]
    if tensors is None or tensors[1].dtype != torch.int64 or not isinstance(ignored, int):
        return
    logits, chain = _classes_second(loss["input"]), ()
    if logits is None:
        logits, chain = _without_last_row(loss)
    if logits is not None and not hazards.between((loss["input"], *chain, loss.node)):
        _replace(loss, logits, chain)


def _classes_second(node: Node) -> Node | None:
    """The tensor (B, T, ..., V) if ``node`` transposes it to (B, V, T, ...), else None."""
    source = next(iter(node.all_input_nodes), None)
    (logits,) = plain(source) or (None,)
    if logits is None or logits.dim() < 3 or not is_view(node, logits.movedim(-1, 1)):
        return None
    return source


def _without_last_row(loss: Call) -> tuple[Node | None, tuple[Node, ...]]:
    """The logits (B, T, V) and the nodes between them and the loss, first the slice, if the loss
    reads all rows except the last of each sequence; (None, ()) for others."""
    rows, target = fake(loss["input"]), fake(loss["target"])
    *after, cut = chain(loss["input"], _is_copy)
    source = next(iter(cut.all_input_nodes), None)
    (logits,) = plain(source) or (None,)
    if rows.dim() != 2 or target.dim() != 1 or logits is None or logits.dim() != 3:
        return None, ()
    if any(len(n.users) != 1 for n in (*after, cut)) or not is_view(cut, logits[:, :-1]):
        return None, ()
    static = all(isinstance(size, int) for size in (*logits.shape, *target.shape))
    matrix = static and rows.shape[1] == logits.shape[2]
    # Infinite logits in unread rows would give NaNs in the gradient.
    overflows = fake(base(source, is_cast)).dtype == torch.float16
    return (source, (cut, *reversed(after))) if matrix and not overflows else (None, ())


def _is_copy(node: Node) -> bool:
    if kind(node) not in ("casts", "copies"):
        return kind(node) == "names"
    before, after = fake(node.all_input_nodes[0]), fake(node)
    tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    if not tensors or before.device != after.device or not before.is_floating_point():
        return False
    return torch.promote_types(before.dtype, after.dtype) == after.dtype


def _replace(loss: Call, logits: Node, chain: tuple[Node, ...]) -> None:
    """Replace ``loss`` by the loss of all rows of ``logits``. ``chain``: the slice that drops the
    last row of each sequence, if there is one, and the nodes after it."""
    node, put, classes = loss.node, Put(loss.node), loss["target"]
    if chain:
        rows = fake(chain[0]).shape[:2]
        padding = (0, 1), "constant", loss["ignore_index"]
        classes = put(F.pad, put("view", classes, *rows), *padding)
    options = {key: loss[key] for key in ("ignore_index", "reduction", "label_smoothing")}
    # Autocast casts the logits to float32, but nodes here are recorded without autocast.
    result = _all_rows(put, logits, put("flatten", classes), fake(node).dtype, options)
    if loss["reduction"] == "none":
        result = put("view_as", result, classes)
        if chain:
            result = put("flatten", put(operator.getitem, result, (Ellipsis, slice(None, -1))))
    replace(node, result)
