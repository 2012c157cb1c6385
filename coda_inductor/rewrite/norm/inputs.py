# SPDX-License-Identifier: Apache-2.0
"""What makes a norm's input: the epilogue of a GEMM, or the norm stays.

Where an epilogue makes x, it makes the statistics and h as well, and no kernel is left of the norm.
Where a kernel of Inductor's makes x, that kernel is left, and moves as many bytes with h as with n.
"""

from __future__ import annotations

from torch.fx import Node

from coda_inductor.graph.gemms import producer
from coda_inductor.graph.nodes import arguments
from coda_inductor.graph.sides import Scope
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse


def input_refusal(norm: Node, scope: Scope, record: Record) -> Refusal | None:
    """Why no epilogue makes the statistics of ``norm``, or None."""
    x, plan = arguments(norm)["x"], record.plan
    source = producer(x)
    if source is None:
        return refuse("norm-input-no-gemm", "its input is not made by a GEMM")
    if (why := plan.legal(source)) is not None:
        return why.within(f"the GEMM that makes its input, {source.name}, is not fused: {{}}")
    if not plan.absorbs(source, x, scope):
        return refuse(
            "norm-input-elsewhere", f"its input is not made in the epilogue of {source.name}"
        )
    return None
