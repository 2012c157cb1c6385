# SPDX-License-Identifier: Apache-2.0
"""All GEMMs of a graph, in order: grow, judge, emit, report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch.fx import Graph, Node

from coda_inductor.errors import FallbackError
from coda_inductor.fuse.elementwise import LOWERINGS, REDUCTIONS
from coda_inductor.fuse.emit import check_views, emit, expand
from coda_inductor.fuse.grow import grow
from coda_inductor.fuse.pair import pair_with
from coda_inductor.fuse.region import NoRegionError, Region
from coda_inductor.fuse.sums import sum_with
from coda_inductor.fuse.traffic import bytes_moved, bytes_plain
from coda_inductor.graph.gemms import GEMMS, OPTIONAL, gemm_inputs, producer
from coda_inductor.graph.nodes import (
    ALIASES,
    elementwise,
    fake,
    is_cast,
    is_transpose,
    module_path,
    readers,
)
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.log import Failure, logger, warn_once
from coda_inductor.report import SiteReport
from coda_inductor.runtime import pool
from coda_inductor.runtime.launch import requests
from coda_inductor.select.policy import Policy, Verdict

#: On a GEMM's node, or the call that took its place: the number of its report in the list.
SITE = "coda_site"


def fuse_gemms(graph: Graph, policy: Policy) -> tuple[list[SiteReport], Counter[str]]:
    """Fuse what may and should be fused, in place.

    Returns a report for every GEMM and how often each pattern fired. A site whose rendering or
    compilation fails is expanded to plain aten ops, alone.

    Raises:
        FallbackError: with ``options["strict"]``, instead of any fallback caused by a failure.
    """
    sites: list[SiteReport] = []
    fired: set[tuple[str, str]] = set()
    calls: dict[Node, int] = {}
    done: set[Node] = set()
    scope = Scope(graph)
    for anchor in [n for n in graph.nodes if n.target in GEMMS]:
        if anchor in done:
            continue
        region, site, verdict = _guarded_plan(anchor, scope, policy)
        if verdict is not None and verdict.how != "unfused":
            done |= set(region.anchors)
            fired |= _patterns(region)
            assert site.program is not None, "a fused site has a program"
            strict = policy.options.strict
            call = emit(graph, region, site.program, verdict.config, site=site.site, strict=strict)
            calls[call] = len(sites)
            scope.refresh(graph)
        else:
            call = anchor
        call.meta[SITE] = len(sites)
        sites.append(site)
        logger.debug(
            "fuse: %s %s: %s%s", site.site, site.how, ", ".join(site.absorbed),
            f" ({site.reason})" if site.reason else "",
        )  # fmt: skip
    if not policy.dry:
        _announce(sites, policy)
        _lower(graph, calls, sites, policy)
    graph.eliminate_dead_code()
    return sites, Counter(name for name, _ in fired)


def _guarded_plan(
    anchor: Node, scope: Scope, policy: Policy
) -> tuple[Region, SiteReport, Verdict | None]:
    """:func:`_plan`; an exception in it costs this site only (nothing has been changed yet)."""
    try:
        return _plan(anchor, scope, policy)
    except Exception as error:
        logger.debug("planning %s failed", anchor.name, exc_info=True)
        reason = Failure(f"{type(error).__name__} in our own passes: {error}")
        return Region((anchor,)), replace(_site(anchor, scope), reason=reason), None


def _announce(sites: list[SiteReport], policy: Policy) -> None:
    """One warning a cause, naming the first site; an error instead when strict."""
    failures: dict[str, list[str]] = {}
    for site in sites:
        if isinstance(site.reason, Failure):
            failures.setdefault(str(site.reason), []).append(site.site)
    for cause, names in failures.items():
        more = f" (and {len(names) - 1} more GEMMs of its graph)" if len(names) > 1 else ""
        if policy.options.strict:
            raise FallbackError(f"GEMM {names[0]}{more}: {cause}")
        warn_once("GEMM", cause, first=names[0] + more)


def _site(anchor: Node, scope: Scope) -> SiteReport:
    a, b = gemm_inputs(anchor)
    shape = (fake(a).shape[0], fake(b).shape[-1], fake(a).shape[-1])
    moved = bytes_plain(anchor)
    role = "weight gradient" if is_transpose(a) else "input gradient"
    return SiteReport(
        module_path(anchor) or anchor.name,
        shape,
        bytes_before=moved,
        bytes_after=moved,
        role="forward" if anchor in scope.forward else role,
    )


def _name(anchors: tuple[Node, ...]) -> str:
    """``mlp.gate_proj``, or ``mlp.gate_proj + up_proj`` for a pair; node names without modules."""
    first, *others = (module_path(anchor) or anchor.name for anchor in anchors)
    return " + ".join([first, *(other.rpartition(".")[2] for other in others)])


def _plan(anchor: Node, scope: Scope, policy: Policy) -> tuple[Region, SiteReport, Verdict | None]:
    """The best region of ``anchor``, its report so far, and how it runs (None: it does not)."""
    site = _site(anchor, scope)
    if policy.dry:
        site = replace(site, estimate=policy.estimate_plain(anchor))
    alone = Region((anchor,))
    if (reason := policy.legal(anchor)) is not None:
        if isinstance(reason, Failure) and not _neighbours(anchor):
            reason = f"nothing to absorb, and {reason}"  # nothing is lost: no warning
        reason = _excused(anchor, reason)
        return alone, replace(site, reason=reason), None
    reason = ""
    for grown in _candidates(anchor, scope, policy):
        try:
            region = grown()
            if region is None:
                continue
            if not region.work:
                return region, replace(site, reason=_idle(region)), None
            check_views(region)
        except NoRegionError as error:
            reason = reason or str(error)
            continue
        program = region.program()
        behind = _behind(region, scope)
        verdict = policy.judge(region, program, behind)
        if verdict.how == "unfused":
            reason = reason or verdict.reason
            continue
        before, after = bytes_moved(region, verdict.config)
        site = replace(
            site,
            site=_name(region.anchors),
            shape=region.shape,
            patterns=tuple(sorted({name for name, _ in _patterns(region)})),
            absorbed=tuple(_short(n) for n in region.work if not is_cast(n)) or ("cast",),
            bytes_before=before,
            bytes_after=after,
            stopped=tuple(f"{_short(n)}: {why}" for n, why in region.refusals.items()),
            estimate=policy.estimate(region, program, behind) if policy.dry else None,
            how=verdict.how,
            reason=verdict.reason,
            program=program,
            config=verdict.config,
        )
        return region, site, verdict
    return alone, replace(site, reason=_excused(anchor, reason)), None


def _excused(anchor: Node, reason: str) -> str:
    """``reason``, no failure where the GEMM need not be fused."""
    return str(reason) if anchor.meta.get(OPTIONAL) else reason


def _behind(region: Region, scope: Scope) -> frozenset[str]:
    """The stores of the region that an elementwise kernel of the same pass reads, which no later
    GEMM will absorb."""
    inside = {*region.values, *region.reduces}
    return frozenset(
        f"out{i}"
        for i, nodes in enumerate(region.stored().values())
        if any(
            elementwise(user)
            and scope.same_side(user, region.anchors[0])
            and producer(user) in region.anchors
            for node in nodes
            for user in readers(node, through=lambda u: u.target in ALIASES)[1]
            if user not in inside
        )
    )


def _neighbours(anchor: Node) -> list[Node]:
    """What an epilogue could absorb right behind ``anchor``."""
    _, users = readers(anchor, through=lambda u: u.target in ALIASES)
    return [u for u in users if u.target in LOWERINGS or u.target in REDUCTIONS or is_cast(u)]


def _candidates(
    anchor: Node, scope: Scope, policy: Policy
) -> Iterator[Callable[[], Region | None]]:
    """How to grow regions around ``anchor``, the most profitable first."""
    if (found := sum_with(anchor, scope, policy.legal)) is not None:
        yield partial(grow, found[0], scope, found[1])
    yield partial(pair_with, anchor, scope)
    yield partial(grow, (anchor,), scope)


def _short(node: Node) -> str:
    """``mul`` for ``aten.mul.Tensor``: what a reader of the table wants."""
    return str(node.target).removeprefix("aten.").removeprefix("coda_inductor.").split(".")[0]


def _idle(region: Region) -> str:
    """Why nothing was absorbed: the first neighbour's reason."""
    for node, reason in region.refusals.items():
        return f"nothing to absorb ({node.name}: {reason})"
    return "its result is not used"


def _patterns(region: Region) -> set[tuple[str, str]]:
    """(pattern, occurrence) of everything a region absorbed."""
    found = {n.meta["coda_pattern"] for n in region.work if "coda_pattern" in n.meta}
    if _adds_residual(region):
        found.add(("residual", region.anchors[0].name))
    if not found:
        found.add(("epilogue", region.anchors[0].name))
    return found


def _adds_residual(region: Region) -> bool:
    """Is an (M, N) operand that nothing else reads added to something computed? A GELU's gradient
    adds x and its cube, LayerNorm's takes a mean from x."""
    m, n, _ = region.shape  # also where M is 1
    tiles = {o.name for (x, _), o in region.operands.items() if same(fake(x).numel(), m * n)}
    loaded = {o.name for o in region.operands.values()}
    reads = Counter(arg for step in region.steps for arg in step.args)
    return any(
        step.op in ("add", "sub")
        and len(loaded.intersection(step.args)) == 1
        and any(arg in tiles and reads[arg] == 1 for arg in step.args)
        for step in region.steps
    )


def _lower(graph: Graph, calls: dict[Node, int], sites: list[SiteReport], policy: Policy) -> None:
    """Compile the kernels side by side; expand what runs through the reference or failed."""
    needed = {c: _requests(c) for c, i in calls.items() if sites[i].how == "kernel"}
    errors = pool.wait([r for group in needed.values() for r in group]) if needed else {}
    for call, group in needed.items():
        error = next((e for r in group if (e := errors[r]) is not None), None)
        if error is None:
            continue
        site = sites[calls[call]]
        cause = f"its kernel does not compile: {error}"
        if policy.options.strict:
            raise FallbackError(f"{site.site}: {cause}")
        warn_once(site.site, cause)
        sites[calls[call]] = replace(site, how="reference", reason=Failure(cause))
    for call, i in calls.items():
        if sites[i].how == "reference":
            expand(graph, call, exact=not policy.rounds(fake(call.args[0][0])))


def _requests(call: Node) -> list[pool.KernelRequest]:
    """The kernels that a call may launch."""
    as_, bs, _, program, config = call.args[:5]
    return requests([fake(a) for a in as_], [fake(b) for b in bs], program, config)
