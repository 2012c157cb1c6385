# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens that are gathered by hand become cross entropies.

Before (policy gradients, DPO; logits (..., V), index (..., 1))::

    p = torch.gather(F.log_softmax(logits, -1), -1, index)

After::

    loss = F.cross_entropy(logits.flatten(0, -2), index.flatten(), reduction="none")
    p = loss.neg().view_as(index)

Why it is valid: a cross entropy of one class is minus its log-softmax. No index is ignored: one
below zero stays the error that it is.

What it enables: rule R7. No log-softmax of all logits is stored, and their gradient is made a slice
of the vocabulary at a time.

Leaves alone, silently, for nothing is lost that was there: log-softmaxes that something else reads
(an entropy), or over another dimension; several tokens a row; rows that are left out, or may be,
for their number is another symbol; what is changed in place between the two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.dynamo.nodes import Put
from coda_inductor.graph.read import Call, read
from coda_inductor.graph.sizes import same
from coda_inductor.matching import Hazards, bodies, normalize, target_name, value
from coda_inductor.matching.normalize import is_last
from coda_inductor.record import Record

#: Of no class, in 32 bits too.
_NOTHING = -(2**31)


def gathered_losses(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    if not record.enabled("cross_entropy"):
        return
    for body in bodies(graph):
        hazards = Hazards(body.graph)
        for node in [n for n in body.graph.nodes if target_name(n) in ("gather", "take_along_dim")]:
            call = read(node)
            if call is not None and (logits := _logits(call, hazards)) is not None:
                _replace(call, logits)


def _logits(gather: Call, hazards: Hazards) -> Node | None:
    """The logits whose log-softmax is gathered, one element a row; None if it is no such."""
    softmax = gather["input"]
    canon = normalize(softmax)
    if canon is None or canon.op != "log_softmax_last" or len(softmax.users) > 1:
        return None
    (logits,) = canon.args
    x, rows, index = value(logits), value(softmax), value(gather["index"])
    if not all(hasattr(t, "fake_mode") for t in (x, rows, index)) or index.dtype != torch.int64:
        return None
    one = x.dim() > 1 and same(tuple(index.shape), (*x.shape[:-1], 1))
    last = is_last(gather["dim"], softmax) and not gather.get("sparse_grad")
    narrowed = torch.promote_types(x.dtype, rows.dtype) != rows.dtype
    if not (one and last and x.is_floating_point()) or narrowed:
        return None
    return None if hazards.between((softmax, gather.node)) else logits


def _replace(gather: Call, logits: Node) -> None:
    """Put the cross entropy in the place of a gather of a log-softmax, computed in its dtype."""
    node, softmax, index = gather.node, gather["input"], gather["index"]
    put = Put(node)
    if value(logits).dtype != value(softmax).dtype:
        logits = put("to", logits, value(softmax).dtype)
    rows, classes = put("flatten", logits, 0, -2), put("flatten", index)
    loss = put(F.cross_entropy, rows, classes, ignore_index=_NOTHING, reduction="none")
    node.replace_all_uses_with(put("view_as", put("neg", loss), index))
    node.graph.erase_node(node)
    node.graph.erase_node(softmax)
