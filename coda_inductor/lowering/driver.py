# SPDX-License-Identifier: Apache-2.0
"""All GEMMs of a graph, in order: grow, judge, emit, report.

Before::

    y = mm(x, w);  z = gelu(y + bias) * scale

After::

    z = gemm_epilogue(x, w, [bias, scale], program)       # all but the product is the program's
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from coda_inductor.fuse.emit import check_views, emit
from coda_inductor.fuse.grow import Bans, grow
from coda_inductor.fuse.pair import alternating, find_pair
from coda_inductor.fuse.region import Region
from coda_inductor.fuse.stores import TOO_HEAVY, heaviest
from coda_inductor.fuse.sums import find_sum
from coda_inductor.graph.collectives import overlap
from coda_inductor.graph.gemms import GEMMS, gemm_inputs, low_rank, producer, routes_of
from coda_inductor.graph.nodes import elementwise, fake, is_cast, is_transpose, locate, renames
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.graph.vocabulary import LOWERINGS, REDUCTIONS
from coda_inductor.graph.walk import readers
from coda_inductor.kernels import Site, Tuner
from coda_inductor.log import logger
from coda_inductor.lowering import described
from coda_inductor.lowering.lower import SITE, lower
from coda_inductor.options import GEMM
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, Refused, failed, refuse
from coda_inductor.report import SiteReport
from coda_inductor.semantic.define import CROSSING

#: Grows one region, given the nodes that must stay outside; None if there is no such region.
Builder = Callable[[dict[Node, Refusal]], Region | None]
#: How often a graph is planned again after sites were measured.
_REPLANS = 4
#: Ops that an epilogue may absorb.
_ABSORBED = LOWERINGS.keys() | REDUCTIONS.keys()
#: Counters of a whole site: one that is disabled is not fused.
_SITE_COUNTERS = frozenset({"experts_backward"})


def fuse_gemms(graph: Graph, record: Record) -> None:
    """Fuse every GEMM that may and should be fused, in place. A failure affects only its site.

    The record gets a report for every GEMM, and how often each pattern fired.

    Raises:
        FallbackError: with ``options["strict"]``, instead of any fallback caused by a failure.
    """
    plans = _fuse_measured(graph, record)
    for site in (plan.report for plan in plans.values()):
        record.report.sites.append(site)
        logger.debug(
            "fuse: %s %s: %s%s", site.site, site.how, ", ".join(site.absorbed),
            f" ({site.reason})" if site.reason else "",
        )  # fmt: skip
    if not record.dry:
        lower(graph, [call for call, plan in plans.items() if plan.fused], record)
    graph.eliminate_dead_code()
    fired = {occurrence for plan in plans.values() for occurrence in plan.patterns}
    for name, times in Counter(name for name, _ in fired).items():
        record.fire(name, times)


def _fuse_measured(graph: Graph, record: Record) -> dict[Node, "_SitePlan"]:
    """Fuse with the best plan. With ``tune`` "always", sites are measured and the graph is planned
    again: a losing pair's GEMMs become sites of their own. Else the command ``tune`` gets them."""
    plan, copy = record.plan, snapshot(graph) if record.plan.measures else None
    result, left = _fuse_all(graph, record)
    if not left or plan.store is None:
        return result
    if copy is not None:
        tuner = Tuner(plan.store, left[0].device, record.options.tune_seconds)
        try:
            for _ in range(_REPLANS):
                if not tuner.measure(left):
                    break
                restore(graph, copy)
                result, left = _fuse_all(graph, record)
        finally:
            tuner.close()
    if left and (plan.measures or not record.dry):
        plan.store.leave(left)
    # The next process has time for the others, so no cache may keep this graph.
    record.failed |= plan.measures and bool(left)
    return result


def _fuse_all(graph: Graph, record: Record) -> tuple[dict[Node, "_SitePlan"], list[Site]]:
    """Fuse all GEMMs. Returns the plan of each, by its call, or by its own node if it is not fused;
    and the sites whose choice a measurement could change.
    """
    plans: dict[Node, _SitePlan] = {}
    done: set[Node] = set()
    planner = _Planner(graph, record)
    # A low-rank product takes as long as its stores, so shared work goes to the other product.
    for anchor in sorted((n for n in graph.nodes if n.target in GEMMS), key=low_rank):
        if anchor in done:
            continue
        plan = planner.plan(anchor)
        call = anchor
        if plan.fused is not None:
            region, site = plan.fused
            done |= set(region.anchors)
            call = emit(region, site, strict=record.options.strict)
            planner.scope.refresh()
        call.meta[SITE] = plan.report
        plans[call] = plan
    return plans, planner.unmeasured


@dataclass(frozen=True)
class _SitePlan:
    """The report of a GEMM; if fused, its region, site, and (pattern, occurrence) of idioms."""

    report: SiteReport
    fused: tuple[Region, Site] | None = None
    patterns: frozenset[tuple[str, str]] = frozenset()


class _Planner:
    """Decides the fate of each GEMM of one graph, without changes to the graph."""

    def __init__(self, graph: Graph, record: Record):
        self.record, self.scope = record, Scope(graph, eager=record.options.numerics == "eager")
        self.unmeasured: list[Site] = []
        self.bans = {
            node: _disabled(node.meta["coda_pattern"][0])
            for node in graph.nodes
            if not record.enabled(node.meta.get("coda_pattern", ("",))[0])
        }

    def plan(self, anchor: Node) -> _SitePlan:
        """The plan for ``anchor``: its report, and its region if it is fused."""
        try:
            return self._plan(anchor)
        except Exception as error:
            logger.debug("planning %s failed", anchor.name, exc_info=True)
            why = failed(error).at("gemm", locate(anchor))
            return _refuse_site(described.unfused(anchor, self.scope), why)

    def _plan(self, anchor: Node) -> _SitePlan:
        report = described.unfused(anchor, self.scope)
        if self.record.plan.dry:
            report = replace(report, choice=self.record.plan.estimate_plain(anchor))
        if (why := overlap(anchor) or self.record.sites.refusal(anchor)) is not None:
            neighbours = (u for u in readers(anchor)[1] if u.target in _ABSORBED or is_cast(u))
            if (why.failure or described.is_wgrad(anchor)) and not any(neighbours):
                text = f"nothing to absorb, and {why.text}"  # nothing is lost
                why = refuse("no-neighbours", text)
            return _refuse_site(report, _excuse(anchor, why))
        _, users = readers(anchor, lambda n: renames(n) or is_transpose(n))
        if routes_of(anchor)[0] is None and {user.op for user in users} == {"output"}:
            text = "nothing to absorb: the caller reads it (it is an output of the graph)"
            return _refuse_site(report, refuse("no-neighbours", text))
        first: Refusal | None = None
        for builder in self._candidates(anchor):
            try:
                result = self._grow(builder)
                if result is None:
                    continue
                region, site = result
                if region.idle and not region.program.grouped:
                    return _refuse_site(report, described.idle_reason(region))
                check_views(region)
            except Refused as error:
                first = first or error.refusal
                continue
            plan = self._judge(region, site, report)
            if isinstance(plan, _SitePlan):
                return plan
            first = first or plan
        return _refuse_site(report, _excuse(anchor, first))

    def _site(self, region: Region) -> Site:
        """``region`` as a site: a sum's terms are read in place, or weights are concatenated."""
        terms, copied = len(region.anchors) if region.in_place else 1, ()
        if region.total is not None and not region.in_place:
            copied = tuple(fake(gemm_inputs(anchor)[0]).shape[1] for anchor in region.anchors)
        return self.record.sites.refined(
            region, terms=terms, copied=copied, after=self._later_reads(region),
            name=described.name_of(region.anchors),
        )  # fmt: skip

    def _candidates(self, anchor: Node) -> Iterator[Builder]:
        """Functions that grow regions around ``anchor``, the most profitable first."""
        refusal = self.record.sites.refusal
        sums = None if self.scope.eager else find_sum(anchor, self.scope, refusal)
        if sums is not None:
            yield lambda bans: grow(sums[0], self.scope, bans, sums[1])
        yield lambda bans: alternating(anchor, self.scope, bans)
        yield lambda bans: find_pair(anchor, self.scope, bans)
        yield lambda bans: grow((anchor,), self.scope, bans)
        find = functools.partial(anchor.graph.find_nodes, op="call_function")
        calls = (call for op in CROSSING for call in find(target=op))
        crossing = [n for n in calls if producer(n.all_input_nodes[0]) is anchor]
        if crossing and not {*readers(anchor)[1]} <= {*crossing}:  # else nothing would be left
            yield lambda bans: self._without(crossing, anchor, bans)

    def _without(self, crossing: list[Node], anchor: Node, bans: Bans) -> Region | None:
        """The region without ``crossing``, if a program with these is slower; None if empty."""
        refusals = dict.fromkeys(crossing, refuse("no-gemm", "its GEMM is fused without it"))
        region = grow((anchor,), self.scope, {**refusals, **bans})
        return region if region.work else None

    def _grow(self, builder: Builder) -> tuple[Region, Site] | None:
        """The region without disabled patterns and small enough, and its site; or None."""
        bans = dict(self.bans)
        while (region := builder(bans)) is not None and not self.record.enabled("residual"):
            adds = [node for node in _residual_adds(region) if node not in bans]
            if not adds:
                break
            bans |= dict.fromkeys(adds, _disabled("residual"))
        while region is not None:
            site = self._site(region)
            fits = not region.work or self.record.sites.fits(site)
            heavy = [] if fits else heaviest(region)
            if not heavy:
                return region, site
            bans |= dict.fromkeys(heavy, TOO_HEAVY)
            region = builder(bans)
        return None

    def _judge(self, region: Region, site: Site, report: SiteReport) -> _SitePlan | Refusal | None:
        """The plan of ``region``, or the reason why it is not fused; None where none is known."""
        absorbed = frozenset(_patterns(region, self.scope))
        patterns = sorted({name for name, _ in absorbed})
        names = [*(patterns if patterns == ["epilogue"] else _SITE_COUNTERS.intersection(patterns))]
        names += [f"{GEMM}{locate(anchor)}" for anchor in region.anchors]
        if off := [name for name in names if not self.record.enabled(name)]:
            return _disabled(off[0])
        site = replace(site, choice=self.record.plan.judge(site))
        runs = self.record.plan.on_kernels(site.device)
        if runs and site.choice.config and not site.choice.measured:
            self.unmeasured.append(site)
        if site.choice.how == "unfused":
            return site.choice.refusal
        if region.program.grouped and not _SITE_COUNTERS.intersection(patterns):
            patterns = ["experts", *(name for name in patterns if name != "epilogue")]
        before, after = described.bytes_moved(region, site.choice.config)
        ended = region.refusals.items()
        report = replace(
            report,
            site=site.name,
            shape=region.shape,
            patterns=tuple(patterns),
            absorbed=described.op_names(region),
            bytes_before=before,
            bytes_after=after,
            stops=tuple(described.stop(n, why).at(described.short(n), n.name) for n, why in ended),
            choice=site.choice,
            program=site.program,
        )
        return _SitePlan(report, (region, site), absorbed)

    def _later_reads(self, region: Region) -> frozenset[str]:
        """The stores that an elementwise kernel of the same pass reads and no other GEMM will
        absorb: the last GEMM before that kernel is in the region, or the region reads it."""
        inside = {*region.values, *region.reduces}
        last = {*region.anchors, *filter(None, (producer(x) for x, _ in region.operands))}
        return frozenset(
            f"out{i}"
            for i, nodes in enumerate(region.stored().values())
            if any(
                elementwise(user)
                and self.scope.same_side(user, region.anchors[0])
                and producer(user) in last
                for node in nodes
                for user in readers(node)[1]
                if user not in inside
            )
        )


def _refuse_site(report: SiteReport, why: Refusal | None) -> _SitePlan:
    return _SitePlan(replace(report, choice=replace(report.choice, refusal=why)))


def _disabled(name: str) -> Refusal:
    return refuse("disabled", f"options['disable'] names {name!r}")


def _excuse(anchor: Node, why: Refusal | None) -> Refusal | None:
    """``why``, but as an excused reason for a weight gradient, whose K no kernel may support."""
    return why.excused() if why is not None and described.is_wgrad(anchor) else why


def _patterns(region: Region, scope: Scope) -> set[tuple[str, str]]:
    """(pattern, occurrence) of each idiom that a region absorbed."""
    if not region.work:
        return set()
    patterns = {n.meta["coda_pattern"] for n in region.work if "coda_pattern" in n.meta}
    if _residual_adds(region):
        patterns.add(("residual", region.anchors[0].name))
    anchor = region.anchors[0]
    if routes_of(anchor)[1] is not None and anchor not in scope.forward:
        patterns.add(("experts_backward", anchor.name))
    return patterns or {("epilogue", region.anchors[0].name)}


def _residual_adds(region: Region) -> list[Node]:
    """The nodes that add an (M, N) operand, which nothing else reads, to a computed value. A GELU's
    gradient adds x and its cube, and LayerNorm's subtracts a mean from x: these do not count."""
    m, n, _ = region.shape  # also where M is 1
    tiles = {o.name for (x, _), o in region.operands.items() if same(fake(x).numel(), m * n)}
    loaded = {o.name for o in region.operands.values()}
    reads = Counter(arg for step in region.steps for arg in step.args)
    adds = {
        step.name
        for step in region.steps
        if step.op in ("add", "sub")
        and len(loaded.intersection(step.args)) == 1
        and any(arg in tiles and reads[arg] == 1 for arg in step.args)
    }
    steps = {node: region.unrounded(v) for node, v in (region.values | region.copies).items()}
    return [node for node, step in steps.items() if step is not None and step.name in adds]
