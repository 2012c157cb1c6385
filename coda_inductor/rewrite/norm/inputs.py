# SPDX-License-Identifier: Apache-2.0
"""What makes a norm's input: the epilogue of a GEMM, or a kernel of Inductor's.

Where an epilogue makes x, it makes the statistics and h as well, and no kernel is left of the norm.
Where a kernel of Inductor's makes x (a norm between a projection and the residual, dropout)::

    x = x0 + norm(y);  n = rms_norm(x, gamma, eps);  z = n @ W
    x = x0 + norm(y);  h = x * gamma;  rstd = rsqrt(mean(x * x) + eps);  z = (h @ W) * rstd

that kernel is left, and moves as many bytes, h in place of n. It has one loop over the row less: n
needs rstd, h does not. In training, the epilogue of the GEMM that makes n's gradient finishes dx,
where a GEMM makes dz, and h, as n was, is made again there, not kept; elsewhere the gradients stay.
No GPU was measured with it: there it needs ``gate="always"``.

A norm of what comes from outside of the graph, or from a lookup, would move as many bytes as well.
It stays: it is one of a whole model, or the one in front of queries, keys and values of a block
that is compiled by itself, and nobody has measured that its loop is worth it. A LayerNorm reads its
weights again, which only a kernel that is no longer there would pay for.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from coda_inductor.fuse.grow import reaches
from coda_inductor.graph.collectives import behind, between
from coda_inductor.graph.gemms import GEMMS, producer
from coda_inductor.graph.nodes import sources
from coda_inductor.graph.sides import Scope
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.norm.forward import NORMS
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.semantic.norms import rms_norm


def input_refusal(norm: Node, scope: Scope, record: Record) -> Refusal | None:
    """Why no epilogue makes the statistics of ``norm``, or None."""
    legal, source = record.policy.legal, producer(norm.args[0])
    if source is None:
        if (collective := behind(norm.args[0])) is not None:
            return between(collective, "it and the GEMM that makes its input")
        return refuse("norm-input-no-gemm", "its input is not made by a GEMM")
    if (why := legal(source)) is not None:
        return why.within(f"the GEMM that makes its input, {source.name}, is not fused: {{}}")
    if not reaches(source, norm.args[0], scope):
        return refuse(
            "norm-input-elsewhere", f"its input is not made in the epilogue of {source.name}"
        )
    return None


def apart_refusal(norm: Node, found: Uses, why: Refusal, record: Record) -> Refusal | None:
    """Why ``norm``, whose input no epilogue makes for the reason ``why``, does not wait, or None:
    a kernel of Inductor's takes its statistics while it makes its input."""
    unmade = why.code not in ("norm-input-no-gemm", "norm-input-elsewhere")
    if norm.target is not rms_norm or unmade or not _made_here(norm.args[0]):
        return why
    return record.policy.apart_norm_loses(found.gemms[0])


def _made_here(x: Node) -> bool:
    """Is ``x`` computed, element by element, from the result of a GEMM or a norm of this graph?"""
    return any(
        node.target in GEMMS or (node.target is operator.getitem and node.args[0].target in NORMS)
        for node in sources(x)
    )
