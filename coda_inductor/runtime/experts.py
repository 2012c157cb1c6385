# SPDX-License-Identifier: Apache-2.0
"""On CUDA, the ops around a mixture's experts run the kernels of ``mainloop.experts``; if one does
not support a call, or fails, torch's ops run, after one warning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from coda_inductor.log import warn_once
from coda_inductor.mainloop import availability
from coda_inductor.program.dtypes import HALF, dtype_name
from coda_inductor.runtime.worker import KernelRequest
from coda_inductor.select.device import arch_of
from coda_inductor.semantic import experts
from coda_inductor.semantic.define import LIB
from coda_inductor.semantic.experts import COMBINE, ROUTE, WGRAD


def _kernel(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of that name, or ``plain``."""

    def call(first, *others):
        try:
            from coda_inductor.mainloop import experts as kernels

            return getattr(kernels, name)(first, *others)
        except Exception as error:
            warn_once(name, repr(error), to="torch's ops")
            return plain(first, *others)

    return call


_route = _kernel("route", experts.route)
_combine = _kernel("combine", experts.combine)
_gradient = _kernel("grouped_wgrad", experts.grouped_wgrad)


def _takes(a, rows, bs) -> bool:
    """QuACK's GEMM takes 16 bits and rows of 16 bytes, on Hopper. For rows that are already sorted
    it was not measured, so torch's op runs."""
    sizes = (a.shape[1], *(b.shape[1] for b in bs))
    fits = rows is not None and a.dtype in HALF and a.is_cuda
    fits = fits and all(isinstance(size, int) and size % 8 == 0 for size in sizes)
    return fits and availability.kernel_stack(a.device) is None and arch_of(a.device) == 9


def requests(a, rows, bs, turned: bool) -> list[KernelRequest]:
    """The kernels that a gradient of weights launches, as ``runtime.launch.requests``."""
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


def _direct(op, own, *given):
    """The op without the dispatcher (``runtime.direct``)."""
    return (own if given[0].is_cuda else op)(*given)


OPS = (ROUTE, COMBINE, WGRAD)
for _op, _own in zip(OPS, (_route, _combine, _wgrad), strict=True):
    LIB.impl(_op.name().partition("::")[2], _own, "CUDA")
    _op.direct = functools.partial(_direct, _op, _own)
