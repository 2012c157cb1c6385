# SPDX-License-Identifier: Apache-2.0
"""Compiled graphs call our ops' implementations, not the dispatcher.

A call through the dispatcher takes the host about 5 us: arguments are boxed, and the program's text
is copied and hashed again. Inductor's generated code has real tensors and no gradients to record,
so it may call the function itself::

    buf0 = torch.ops.coda_inductor.gemm_epilogue.default.direct([x], [w], [], '{...}', ...)

The C++ wrapper looks ops up by their names and keeps the dispatcher.
"""

import functools
from typing import Any

from coda_inductor.compat import fallback_handler, register_lowering, virtualized
from coda_inductor.runtime import on_cuda, op

#: Each has an attribute ``direct``.
OPS = (op.OP, *on_cuda.OPS)


@functools.cache
def install() -> None:
    """From now on, let Inductor generate calls without the dispatcher."""
    for overload in OPS:
        _install(overload)


def _install(overload: Any) -> None:
    fallback = fallback_handler(overload, add_to_fallback_set=False)
    if fallback is None:
        return

    def lower(*args, **kwargs):
        outputs = fallback(*args, **kwargs)
        graph = virtualized.graph
        if not graph.cpp_wrapper:
            nodes = [x for x in graph.operations if getattr(x, "op_overload", None) is overload]
            nodes[-1].python_kernel_name += ".direct"
        return outputs

    register_lowering(overload, type_promotion_kind=None)(lower)
