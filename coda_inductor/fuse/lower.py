# SPDX-License-Identifier: Apache-2.0
"""Calls of programs become kernels, or plain ops again where there are none."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from coda_inductor.errors import FallbackError
from coda_inductor.fuse.emit import expand
from coda_inductor.graph.nodes import fake
from coda_inductor.log import warn_once
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.report import SiteReport
from coda_inductor.runtime import pool
from coda_inductor.runtime.launch import requests


def lower(graph: Graph, calls: dict[Node, int], record: Record) -> None:
    """Compile the kernels of ``calls`` (each with the number of its site) side by side; expand
    what runs as plain ops or does not compile. One warning a cause.

    Raises:
        FallbackError: with ``options["strict"]``, for a failure.
    """
    sites, policy = record.report.sites, record.policy
    _announce(sites, strict=record.options.strict)
    needed = {c: _requests(c) for c, i in calls.items() if sites[i].how == "kernel"}
    errors = pool.wait([r for group in needed.values() for r in group]) if needed else {}
    for call, group in needed.items():
        error = next((e for r in group if (e := errors[r]) is not None), None)
        if error is None:
            continue
        site = sites[calls[call]]
        why = refuse("defect", f"its kernel does not compile: {error}", failure=True)
        if record.options.strict:
            raise FallbackError(f"{site.site}: {why.text}")
        warn_once(site.site, why.text)
        sites[calls[call]] = replace(site, how="reference", refusal=why)
        record.failed = True
    for call, i in calls.items():
        if sites[i].how == "reference":
            expand(graph, call, exact=not policy.rounds(fake(call.args[0][0])))


def _announce(sites: list[SiteReport], *, strict: bool) -> None:
    """One warning a cause, naming the first site; an error instead when strict."""
    failures: dict[str, list[str]] = {}
    for site in sites:
        if site.refusal is not None and site.refusal.failure:
            failures.setdefault(site.reason, []).append(site.site)
    for cause, names in failures.items():
        more = f" (and {len(names) - 1} more GEMMs of its graph)" if len(names) > 1 else ""
        if strict:
            raise FallbackError(f"GEMM {names[0]}{more}: {cause}")
        warn_once("GEMM", cause, first=names[0] + more)


def _requests(call: Node) -> list[pool.KernelRequest]:
    """The kernels that a call may launch."""
    as_, bs, _, program, config = call.args[:5]
    return requests([fake(a) for a in as_], [fake(b) for b in bs], program, config)
