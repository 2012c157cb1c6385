# SPDX-License-Identifier: Apache-2.0
"""Turn calls of programs into kernels, or back into plain ops where no kernel can run.

A kernel takes seconds to compile. With ``record.later``, compilation only starts here, and Inductor
does its own work meanwhile; :func:`settle` waits for it.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from coda_inductor.errors import FallbackError
from coda_inductor.fuse.emit import expand
from coda_inductor.graph.nodes import arguments, fake
from coda_inductor.kernels import OP, QUACK, pool
from coda_inductor.log import warn_once
from coda_inductor.program import EpilogueProgram
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.report import SiteReport
from coda_inductor.semantic.experts import WGRAD

if TYPE_CHECKING:
    from coda_inductor.plan import Plan

#: Meta of a GEMM's node, or of the call that replaced it: its report.
SITE = "coda_site"


def lower(graph: Graph, calls: list[Node], record: Record) -> None:
    """Compile the kernels of ``calls`` in parallel; expand calls that run as plain ops or do not
    compile. One warning per cause.

    Raises:
        FallbackError: with ``options["strict"]``, for a failure.
    """
    _announce(record.report.sites, strict=record.options.strict)
    kernels = [call for call in calls if call.meta[SITE].how == "kernel"]
    plain = [call for call in calls if call.meta[SITE].how == "reference"]
    kernels += graph.find_nodes(op="call_function", target=WGRAD)
    if record.later:
        pool.submit([request for call in kernels for request in QUACK.requests(call)])
    else:
        _settle(kernels, record)
    for call in plain:
        expand(call, exact=_exact(call, record.plan))


def settle(graph: Graph, record: Record) -> bool:
    """Wait for the kernels of calls in ``graph``, a part of a lowered one. Calls whose kernel does
    not compile become plain ops. Returns True if there are any.

    Raises:
        FallbackError: with ``options["strict"]``, if there are any.
    """
    return _settle([node for node in graph.nodes if node.target in (OP, WGRAD)], record)


def _settle(calls: list[Node], record: Record) -> bool:
    kernels = {call: QUACK.requests(call) for call in calls}
    errors = pool.wait([r for group in kernels.values() for r in group]) if kernels else {}
    changed = False
    for call, group in kernels.items():
        error = next((e for r in group if (e := errors[r]) is not None), None)
        if error is None:
            continue
        site: SiteReport | None = call.meta.get(SITE)
        name = call.name if site is None else site.site
        why = refuse("defect", f"its kernel does not compile: {error}", failure=True)
        if record.options.strict:
            raise FallbackError(f"{name}: {why.text}")
        if call.target is WGRAD:  # this op falls back by itself
            continue
        warn_once(name, why.text)
        if site is not None:
            site.choice = replace(site.choice, how="reference", refusal=why)
        record.failed = changed = True
        expand(call, exact=_exact(call, record.plan))
    return changed


def _announce(sites: list[SiteReport], *, strict: bool) -> None:
    """Log one warning per cause, with the first site; with ``strict``, raise an error."""
    failures: dict[str, list[str]] = {}
    for site in sites:
        if site.refusal is not None and site.refusal.failure:
            failures.setdefault(site.reason, []).append(site.site)
    for cause, names in failures.items():
        others = f" (and {len(names) - 1} more GEMMs of its graph)" if len(names) > 1 else ""
        if strict:
            raise FallbackError(f"GEMM {names[0]}{others}: {cause}")
        warn_once("GEMM", cause, first=names[0] + others)


def _exact(call: Node, plan: "Plan") -> bool:
    """Does ``call``, where it runs as plain ops, not round its product before the epilogue? It
    never does under a scale of rows, for which a rounded operand waits (not in eager numerics)."""
    args = arguments(call)
    scaled = any(o.kind == "col" for o in EpilogueProgram.from_json(args["program"]).operands)
    scaled &= plan.options.numerics == "fused"
    return scaled or not plan.rounds(fake(args["as_"][0]))
