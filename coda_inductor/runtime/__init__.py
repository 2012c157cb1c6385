# SPDX-License-Identifier: Apache-2.0
"""What runs: the custom op, kernel configs and their expected cost, ahead-of-time compilation.

Importing this package registers the op and imports no kernel library (QuACK, CuTeDSL, Triton):
those are imported when the first kernel is built, and their absence is a reason, not an error.

Layer map: ``op`` -> ``launch`` -> ``tensors``; ``support`` (reasons), ``config`` and ``cost``
(which config, how long), ``pool`` (compile kernels in parallel, ahead of time) -> ``client`` (a
compile server as this process sees it), ``server`` (that process), ``worker`` (what it does).
"""

from coda_inductor.runtime.config import Config, choose
from coda_inductor.runtime.cost import cublas_us, estimate_us
from coda_inductor.runtime.launch import requests
from coda_inductor.runtime.loss import linear_cross_entropy_backward
from coda_inductor.runtime.op import forget_failures, gemm_epilogue, set_strict
from coda_inductor.runtime.support import kernel_stack, unsupported

__all__ = [
    "Config",
    "choose",
    "cublas_us",
    "estimate_us",
    "forget_failures",
    "gemm_epilogue",
    "kernel_stack",
    "linear_cross_entropy_backward",
    "requests",
    "set_strict",
    "unsupported",
]
