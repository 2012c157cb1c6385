# SPDX-License-Identifier: Apache-2.0
"""Without gradients, log-probabilities of tokens need no logits in memory.

Before (logits (M, V) = h @ W.T; no backward pass)::

    loss, lse, number = cross_entropy(logits, target)      gathers from the logits

After::

    lse = row_logsumexp(logits)
    picked = where(|arange(V) - target| < 1/2, logits, 0).sum(1);  loss = lse - picked

Why it is valid: the sum has one term, the target's logit. Log-sum-exps, entropies and this sum are
reductions of rows, so that each leaves the head's epilogue as partials; there the logits are
rounded to their dtype first, as they are where they are stored.

Why it pays: the logits are the largest tensor, and reference and old policies want nothing of them.

Leaves alone: training graphs, which read the logits again; logits that anything else reads, that no
GEMM makes, or one that no kernel can run: they are in memory, where one gather finds a target's.
"""

from torch.fx import Graph, Node

from coda_inductor.graph.edit import replace_parts
from coda_inductor.graph.gemms import producer
from coda_inductor.graph.nodes import arguments, renames_or_casts
from coda_inductor.graph.sides import training
from coda_inductor.graph.splice import splice
from coda_inductor.graph.walk import base, readers
from coda_inductor.record import Record
from coda_inductor.semantic.define import DEFINITIONS
from coda_inductor.semantic.loss import compared_cross_entropy, cross_entropy, entropy


def compare_targets(graph: Graph, record: Record) -> None:
    """Apply the rewrite to every ``cross_entropy`` of an inference ``graph``, in place."""
    if training(graph):
        return
    for node in [n for n in graph.nodes if n.target is cross_entropy and _alone(n, record)]:
        meta = {"coda_pattern": (DEFINITIONS[cross_entropy].name, node.name)}
        replace_parts(node, splice(node, compared_cross_entropy, node.args, meta=meta))


def _alone(node: Node, record: Record) -> bool:
    """May a kernel make the logits of ``node``, which only statistics of their rows read?"""
    logits = base(arguments(node)["logits"], renames_or_casts)
    _, users = readers(logits, renames_or_casts)
    gemm = producer(logits)
    alone = gemm is not None and all(u.target in (cross_entropy, entropy) for u in users)
    return alone and record.sites.refusal(gemm) is None
