# SPDX-License-Identifier: Apache-2.0
"""On CUDA, the following ops around products run their own kernels: ops of a mixture's experts
(``mainloop.experts``), casts to FP8 (``mainloop.fp8_casts``) and adapters behind dropout
(``mainloop.dropout``). If a kernel cannot run, torch's ops do, after a warning."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from coda_inductor.arch import arch_of
from coda_inductor.log import warn_once
from coda_inductor.mainloop import availability
from coda_inductor.program.dtypes import HALF, dtype_name
from coda_inductor.runtime.compiler import KernelRequest
from coda_inductor.semantic import dropout, experts, fp8_casts
from coda_inductor.semantic.define import LIB
from coda_inductor.semantic.experts import WGRAD


def _kernel(plain: Callable[..., Any]) -> Callable[..., Any]:
    name, room = plain.__name__, plain.__module__.rpartition(".")[2]

    def call(first, *others):
        try:
            kernels = importlib.import_module(f"coda_inductor.mainloop.{room}")
            return getattr(kernels, name)(first, *others)
        except Exception as error:
            warn_once(name, repr(error), to="torch's ops")
            return plain(first, *others)

    return call


_gradient = _kernel(experts.grouped_wgrad)


def _takes(a, rows, bs) -> bool:
    """Does QuACK's GEMM take these tensors? It needs 16 bits and rows of 16 bytes. For rows that
    are already sorted it was not measured, so torch's op runs."""
    sizes = (a.shape[1], *(b.shape[1] for b in bs))
    if rows is None or a.dtype not in HALF or not a.is_cuda:
        return False
    fits = all(isinstance(size, int) and size % 8 == 0 for size in sizes)
    fits = fits and "experts" in arch_of(a.device).features
    return fits and availability.kernel_stack(a.device) is None


def requests(a, rows, bs, turned: bool) -> list[KernelRequest]:
    """The kernels that a weight gradient launches, as from ``runtime.launch.requests``."""
    if not _takes(a, rows, bs):
        return []
    from coda_inductor.mainloop.experts import columns

    program, variant = f"{WGRAD.name()} {dtype_name(a.dtype)}", "turned" * turned
    return [KernelRequest(program, columns(b.shape[1]), "m", "n", variant) for b in bs]


def _wgrad(a, rows, bs, offsets, turned):
    if bs[0].shape[0] and _takes(a, rows, bs):
        bs = [b.contiguous() for b in bs]
        return _gradient(a.contiguous(), rows, bs, offsets, turned)
    return experts.grouped_wgrad(a, rows, bs, offsets, turned)


def _direct(op, impl, *args):
    """Call the op without the dispatcher (``runtime.direct``)."""
    return (impl if args[0].is_cuda else op)(*args)


OPS = {
    experts.ROUTE: _kernel(experts.route),
    experts.COMBINE: _kernel(experts.combine),
    WGRAD: _wgrad,
    fp8_casts.CAST: _kernel(fp8_casts.fp8_cast),
    fp8_casts.AMAX: _kernel(fp8_casts.fp8_amax),
    fp8_casts.TURN: _kernel(fp8_casts.fp8_turn),
    dropout.FORWARD: _kernel(dropout.dropout_linear),
    dropout.BACKWARD: _kernel(dropout.dropout_linear_backward),
}
for _op, _impl in OPS.items():
    LIB.impl(_op.name().partition("::")[2], _impl, "CUDA")
    _op.direct = functools.partial(_direct, _op, _impl)
