# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs call the op's implementation, not the dispatcher.

A call through the dispatcher takes the host about 5 us: arguments are boxed, the program's text is
copied and hashed again, and an op whose kernel is Python gets new lists of its tensors. Inductor's
generated code has real tensors and no gradients to record, so it may call the function itself::

    buf0 = torch.ops.coda_inductor.gemm_epilogue.default.direct([x], [w], [], '{...}', ...)

That is a name which any process has that has the op, so generated code stays cacheable. The C++
wrapper finds ops by their names and keeps the dispatcher.
"""

from __future__ import annotations

import functools

from coda_inductor.compat import fallback_handler, register_lowering, virtualized
from coda_inductor.runtime import op


@functools.cache
def install() -> None:
    """Let Inductor generate such calls, from now on."""
    fall_back = fallback_handler(op.OP, add_to_fallback_set=False)
    if fall_back is None:
        return

    def lower(*args, **kwargs):
        outputs = fall_back(*args, **kwargs)
        graph = virtualized.graph
        if not graph.cpp_wrapper:
            made = [x for x in graph.operations if getattr(x, "op_overload", None) is op.OP]
            made[-1].python_kernel_name += ".direct"
        return outputs

    register_lowering(op.OP, type_promotion_kind=None)(lower)
