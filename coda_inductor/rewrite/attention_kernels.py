# SPDX-License-Identifier: Apache-2.0
"""The report says which attention runs, and where it runs in plain ops. The graph stays as it is.

Before and after::

    y = bmm(softmax(bmm(q, k^T) * scale + mask), v)

SDPA's math kernel is such ops once the graph is traced, and so is attention that a model writes
out. Both write every score to memory, and read it again. Which kernel SDPA takes is torch's choice,
made before any pass sees the graph. Why it took no fused one (a region of ``sdpa_kernel``, strides,
what the GPU has) does not stand there and is not guessed: said is what is multiplied.

Refuses nothing that anybody else would do: each occurrence is a near miss with its remedy.
"""

from __future__ import annotations

from torch.fx import Graph

from coda_inductor.graph.attention import MATH, Plain, calls, in_plain_ops
from coda_inductor.graph.nodes import fake, place
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse


def say_attention(graph: Graph, record: Record) -> None:
    """Count the implementations of attention in ``graph``, and note each that is plain ops. Changes
    nothing and counts nothing."""
    for each in in_plain_ops(graph):
        record.refuse("attention", place(each.result), _why(each))
    record.report.attention |= calls(graph)


def _why(attention: Plain) -> Refusal:
    scores = fake(attention.scores)
    batch, queries, keys = scores.shape
    said = (
        f"{batch} x {queries} x {keys} scores in {str(scores.dtype).removeprefix('torch.')} on "
        f"{scores.device.type} are written to memory"
    )
    if attention.name == MATH:
        return refuse("attention-math", f"torch took SDPA's math kernel: {said}")
    return refuse("attention-written-out", f"softmax(q k^T) v is written out: {said}")
