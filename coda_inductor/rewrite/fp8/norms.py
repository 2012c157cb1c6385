# SPDX-License-Identifier: Apache-2.0
"""A norm in front of FP8 products is deferred until its result is quantized.

Before::

    x = x0 + y @ Wo; n, r = rms_norm(x, gamma, eps); q, s = quantize(n, [1], ...)

After::

    x = x0 + y @ Wo; h = x * gamma; r = rsqrt(mean(x * x) + eps)        as for other GEMMs
    s = scale(r * amax(abs(h), 1)); q = fp8_cast(x, r, gamma, s)

Why it is valid: n = r h with one positive r per row, so that max |n| = r max |h|, and the cast
multiplies by r, gamma and s at once. The product does not contain r: its scale is n's. Different
rounding: eager rounds n to 16 bits before it is quantized, this rounds only x. Only maxima read h,
so it stays on the tile, and memory has x, which others read as well. Maxima of columns need r
first: x is read once for them. The norm's gradient and its row sums do not change (rule R3 needs
exact operands). Another reader in the backward pass (a weight gradient in 16 bits) reads n, which
is recomputed. So it is if n is float32 and its casts to 16 bits (autocast's) are quantized.

Refuses, besides what ``rewrite.norm`` refuses: another reader in the forward pass.
"""

import operator

import torch
from torch.fx import Node

from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.nodes import arguments, fake, is_cast, label
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.walk import base, parts, readers
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.fp8.scales import Source
from coda_inductor.rewrite.norm.forward import statistics
from coda_inductor.rewrite.norm.uses import input_refusal
from coda_inductor.semantic.norms import NORMS


def wait(nodes: list[Node], scope: Scope, record: Record) -> Source | None:
    """Defer the norm whose result ``nodes``, all its quantizations, read. Returns the source of the
    quantizations; None if there is no norm, or it stays."""
    quantized = fake(arguments(nodes[0])["x"]).dtype
    result = base(arguments(nodes[0])["x"])
    if is_cast(result) and fake(result.all_input_nodes[0]).dtype == torch.float32:
        result = base(result.all_input_nodes[0])
    norm = next(iter(result.all_input_nodes), result)
    spec = NORMS.get(norm.target)
    if result.target is not operator.getitem or spec is None:
        return None
    reads = _reads(result)
    casts = [user for user, _ in reads if is_cast(user) and fake(user).dtype == quantized]
    reads += [read for cast in casts for read in _reads(cast)]
    others = [read for read in reads if read[0] not in {*casts, *nodes}]
    why = _refusal(norm, others, scope, record)
    if why is not None:
        record.refuse(spec.name, norm, why)
        return None
    put = Put(norm, pattern=(spec.name, norm.name))
    deferred = statistics(put, norm, fake(result).dtype)
    stats = [part for i, part in parts(norm).items() if i > 0]
    for part in stats:
        part.replace_all_uses_with(deferred.statistics[arguments(part)["index"] - 1])
    prune(stats)
    x = arguments(norm)["x"]
    x = put.reshape(x, [-1, fake(x).shape[-1]])
    weight = None if deferred.gamma is None else put.reshape(deferred.gamma, [1, -1])
    return Source(deferred.h, x, deferred.flat, weight, others)


def recompute(source: Source) -> None:
    """Let the other readers read a recomputed result of the norm, one for each checkpoint."""
    results: dict[tuple, Node] = {}
    for user, name in sorted(source.others):
        if (key := checkpoint(user)) not in results:
            put, dtype = Put(user), fake(source.factor).dtype
            wide = put.mul(put.cast(source.read, dtype), source.factor)
            if source.weight is not None:
                wide = put.mul(wide, put.cast(source.weight, dtype))
            results[key] = put.cast(wide, fake(name).dtype)
        user.replace_input_with(name, results[key])


def _reads(result: Node) -> list[tuple[Node, Node]]:
    names, users = readers(result)
    return [(user, name) for user in users for name in names if name in user.all_input_nodes]


def _refusal(
    norm: Node, others: list[tuple[Node, Node]], scope: Scope, record: Record
) -> Refusal | None:
    if not record.enabled(name := NORMS[norm.target].name):
        return refuse("disabled", f"options['disable'] names {name}")
    for user, read in others:
        if user in scope.forward or user.op != "call_function":
            return refuse("norm-read-elsewhere", f"{label(user)} reads it, no linear layer does")
        if fake(read).dim() != 2:
            return refuse("norm-reshaped", f"{label(user)} changes its rows")
    return input_refusal(norm, scope, record)
