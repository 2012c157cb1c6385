# SPDX-License-Identifier: Apache-2.0
"""Logits that a loss scales in float32 are kept in the dtype of the head's product.

Before (logits z (M, V) = h @ W.T in 16 bits; a temperature T)::

    x = float32(z) / T;  loss, lse, number = cross_entropy(x, target);  dx = ..._backward(x, ...)

After::

    x' = bfloat16(x);  cross_entropy(x', target);  dx = ..._backward(float32(x'), ...)

Why it is valid: an epilogue scales the accumulators, so x' is rounded once, as z is in eager, and a
number does not change relative errors. Losses and gradients are still computed in float32.

Why it pays: what a loss reads is kept for its gradient, and x is twice the size of z, the largest
tensor of a step. The gradient can then be sliced (``slices``). Without gradients nothing is kept,
but a policy's log-probabilities have to be those of its training.

Leaves alone: logits that anything but a loss or an entropy reads; a product that no kernel makes,
which would be rounded twice.
"""

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import producer
from coda_inductor.graph.nodes import arguments, fake, is_cast, renames_or_casts
from coda_inductor.graph.walk import bare, readers, widens
from coda_inductor.program.dtypes import HALF
from coda_inductor.record import Record
from coda_inductor.rewrite.loss.logit_gradients import constant_factor
from coda_inductor.semantic import loss

_FORWARD = (loss.cross_entropy, loss.entropy)
_BACKWARD = (loss.cross_entropy_backward, loss.entropy_backward)


def round_scaled_logits(graph: Graph, record: Record) -> None:
    """Apply the rewrite to the logits of every loss of ``graph``, in place."""
    losses = [n for n in graph.nodes if n.target in _FORWARD]
    for logits in dict.fromkeys(arguments(n)["logits"] for n in losses):
        if (dtype := _rounded_dtype(logits, record)) is not None:
            users, put = list(logits.users), Put(logits, logits.next)
            narrow = put.cast(logits, dtype)
            wide = put.cast(narrow, fake(logits).dtype)
            for user in users:
                user.replace_input_with(logits, narrow if user.target in _FORWARD else wide)


def kept(logits: Node) -> Node:
    """The rounded tensor that ``logits``, which a gradient reads, are a copy of, if any."""
    inner = logits.all_input_nodes[0] if widens(logits) else logits
    return inner if is_cast(inner) else logits


def _rounded_dtype(logits: Node, record: Record) -> torch.dtype | None:
    """The 16-bit dtype of the product that ``logits`` are a multiple of; None if they stay."""
    multiple = bare(logits)
    if fake(logits).dtype != torch.float32 or constant_factor(multiple) is None:
        return None
    product = bare(multiple.all_input_nodes[0])
    _, users = readers(multiple, renames_or_casts)
    if any(user.target not in (*_FORWARD, *_BACKWARD) for user in users):
        return None
    gemm = producer(product)
    if gemm is None or record.sites.refusal(gemm) is not None:
        return None
    return fake(product).dtype if fake(product).dtype in HALF else None
