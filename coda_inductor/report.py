# SPDX-License-Identifier: Apache-2.0
"""What happened to each GEMM: plain records for debug output, the demo and users."""

from __future__ import annotations

import re
import shutil
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal

#: The first number in a module's path, except at its end: the layer.
LAYER = re.compile(r"(?<![^.])\d+(?=\.)")
#: How a site runs, for people.
RUNS_AS = {"kernel": "kernel", "reference": "legal, plain ops", "unfused": "unfused"}
#: Codes of reasons that tell both times of a site.
TIMED = ("expected-slower", "measured-slower")
#: What a site's times are based on, for people.
GROUNDS = {
    "here": "measured here",
    "shipped": "measured",
    "roofline": "about: a roofline, not measured",
    "unknown": "a guess: no GPU of its generation was measured, an H200's constants",
}


@dataclass(frozen=True)
class Choice:
    """How a site runs, or may run.

    Attributes:
        how: ``"kernel"``, ``"reference"`` (plain ops for Inductor) or ``"unfused"``.
        config: of the kernel, e.g. ``128x192:2x1:pp``; also where a kernel is possible but slower.
        refusal: why it does not run as a kernel.
        fused_us: expected microseconds of the kernel; None without an estimate.
        unfused_us: the same for cuBLAS and Inductor's elementwise kernels; 0 without an estimate.
        ground: what these times are based on: "here" (measured by this user), "shipped" (measured),
            "roofline", or "unknown" (a GPU of a generation without constants).
        added_us: how much longer the kernel takes than its products alone in cuBLAS: as measured,
            of it or of one that differs in its reductions only; else by the roofline.
    """

    how: str
    config: str = ""
    refusal: Refusal | None = None
    fused_us: float | None = None
    unfused_us: float = 0.0
    ground: str = "roofline"
    added_us: float = 0.0

    @property
    def measured(self) -> bool:
        """Were these times measured?"""
        return self.ground in ("here", "shipped")


#: Nothing is known of it.
UNFUSED = Choice("unfused")


@dataclass(frozen=True)
class SiteReport:
    """One GEMM (or gate/up pair of GEMMs).

    Attributes:
        site: the path of the GEMM's module, e.g. ``model.layers.0.mlp.down_proj``; its node name in
            the graph if the graph names no module. Pairs name both.
        shape: (M, N, K); M is an int or a symbolic expression. N is one GEMM's N, also for pairs; K
            is the total of all terms where several GEMMs are summed in one.
        patterns: names of the patterns whose work it absorbed.
        absorbed: the graph ops that now run on its accumulator tile.
        bytes_before: bytes read and written by the GEMM and by one elementwise kernel after it for
            what was absorbed; each kernel counts a tensor once (no cache, no retries).
        bytes_after: the same for the fused kernel, also where the program runs as plain ops
            (``how``), which move more; equal to ``bytes_before`` when not fused.
        role: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        stops: where the epilogue ended and why; ``what`` is the op. Fused sites only.
        choice: how it runs, and why not as a kernel.
        program: the epilogue program; None when not fused.
    """

    site: str
    shape: tuple[object, int, int]
    patterns: tuple[str, ...] = ()
    absorbed: tuple[str, ...] = ()
    choice: Choice = UNFUSED
    program: EpilogueProgram | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    role: str = "forward"
    stops: tuple[Refusal, ...] = ()

    @property
    def how(self) -> str:
        """``"kernel"``, ``"reference"`` (expanded for Inductor) or ``"unfused"``."""
        return self.choice.how

    @property
    def config(self) -> str:
        """Tile and cluster shape of the kernel, e.g. ``128x192:2x1:pp``."""
        return self.choice.config

    @property
    def refusal(self) -> Refusal | None:
        """Why it is not fused, or why not as a kernel; None otherwise."""
        return self.choice.refusal

    @property
    def estimate(self) -> Choice | None:
        """The choice, if it has expected times: that of a kernel and, in ``coda_inductor.explain``,
        that of any GEMM."""
        return self.choice if self.choice.unfused_us else None

    @property
    def fused(self) -> bool:
        return self.how != "unfused"

    @property
    def idle(self) -> bool:
        """Is it a weight gradient with nothing to absorb, like almost all of them?"""
        code = "" if self.fused or self.refusal is None else self.refusal.code
        return self.role == "weight gradient" and code == "no-neighbours"

    @property
    def reason(self) -> str:
        """Why it is not fused, or why not as a kernel, for people; empty otherwise."""
        return "" if self.refusal is None else self.refusal.text

    @property
    def stopped(self) -> tuple[str, ...]:
        """Where the epilogue ended and why, as ``"op: reason"``."""
        return tuple(f"{stop.what}: {stop.text}" for stop in self.stops)

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic that a kernel saves (0 when not fused); if ``how`` is
        ``"reference"``, no kernel runs and they are not saved."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class MemoryReport:
    """What a graph keeps for its backward pass, under a limit of memory.

    Attributes:
        kept: bytes that the forward pass leaves, inputs and outputs of the graph apart.
        before: the same if nothing were computed again.
        again: tensors that are computed again.
        ms: how long that takes, as expected.
        peak: the most bytes that the step takes beyond its inputs, as expected.
    """

    kept: int
    before: int
    again: int
    ms: float
    peak: int

    def __str__(self) -> str:
        kept, before, peak = (f"{x / 2**30:.2f} GiB" for x in (self.kept, self.before, self.peak))
        less = f" in place of {before}, computes {self.again} tensors again" if self.again else ""
        took = f" (about {self.ms:.1f} ms)" if self.again else ""
        return f"keeps {kept} for the backward pass{less}{took}; peak about {peak} over its inputs"


@dataclass
class GraphReport:
    """One compiled graph: its GEMMs, what else was recognized but not rewritten, how often each
    rewrite fired, and, under a limit of memory, what it keeps for the backward pass and computes
    again."""

    name: str
    sites: list[SiteReport] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    folder: str = ""
    memory: MemoryReport | None = None
    fired: Counter[str] = field(default_factory=Counter)

    @property
    def near_misses(self) -> list[str]:
        """The refusals as lines of text: ``rms_norm at model.norm: no GEMM reads it``."""
        return [str(refusal) for refusal in self.refusals]

    @property
    def bytes_saved(self) -> int:
        return sum(site.bytes_saved for site in self.sites)

    @property
    def kernels(self) -> int:
        """How many GEMMs run as a generated kernel."""
        return sum(site.how == "kernel" for site in self.sites)

    @property
    def summary(self) -> str:
        """``15 of 29 GEMMs fused``; without kernels, what may be and why no kernel runs."""
        if not self.sites:
            return "no GEMM in this graph"
        plain = [site for site in self.sites if site.how == "reference"]
        said = []
        if self.kernels or not plain:
            said.append(f"{self.kernels} of {len(self.sites)} GEMMs fused")
        if plain:
            legal = f"{len(plain)} of {len(self.sites)} GEMMs"
            said.append(f"{legal} may be fused, and run as plain ops: {plain[0].reason}")
        return ", ".join(said)

    def table(self) -> str:
        """:func:`sites_table` of the GEMMs, near misses and, with debugging, kernels' files."""
        lines = [f"memory: {self.memory}"] if self.memory is not None else []
        lines += [f"near miss: {m}" for m in self.near_misses]
        for row in fold(self.sites) if self.folder else ():
            if row.site.program is not None:
                lines.append(f"{row.name}: {self.folder}/kernels/{row.site.program.key}.py")
        return "\n".join([sites_table(self.sites), *lines])


@dataclass(frozen=True)
class Row:
    """Sites that differ only in the layer. ``name`` has ``*`` in place of its number."""

    name: str
    sites: tuple[SiteReport, ...]

    @property
    def site(self) -> SiteReport:
        return self.sites[0]

    @property
    def times(self) -> int:
        return len(self.sites)

    @property
    def layers(self) -> str:
        return ", ".join(m[0] for s in self.sites if (m := LAYER.search(s.site)))


def fold(sites: Sequence[SiteReport]) -> list[Row]:
    """Rows in the order of their first site, without idle weight gradients."""
    groups: dict[Hashable, list[SiteReport]] = {}
    for site in (site for site in sites if not site.idle):
        same = (
            general_path(site.site), str(site.shape), site.role, site.how, site.patterns,
            site.absorbed, site.refusal and site.refusal.code, site.bytes_before, site.bytes_after,
            site.program.key if site.program else None,
        )  # fmt: skip
        groups.setdefault(same, []).append(site)
    return [
        Row(s[0].site if len(s) == 1 else general_path(s[0].site), tuple(s))
        for s in groups.values()
    ]


def sites_table(sites: Sequence[SiteReport], gpu: str = "") -> str:
    """GEMMs as a text table as wide as the terminal, equal layers in one row, without columns that
    are empty; times are those on ``gpu``. Weight gradients with nothing to absorb are one line
    below. Without kernels, the bytes are those that one would move."""
    heads = ["GEMM", "x", "M x N x K", "runs as", "absorbed, or why not", "bytes",
             f"us on {gpu}" if gpu else "us"]  # fmt: skip
    rows = [
        (
            row.name, str(row.times), shape_text(row.site),
            f"{RUNS_AS[row.site.how]}, {row.site.role}",
            ": ".join(filter(None, map(", ".join, (row.site.patterns, row.site.absorbed))))
            if row.site.fused else row.site.reason,
            " ".join(traffic_words(row.site)),
            (us := time_words(row.site)[0]) + "*" * (bool(us) and not row.site.estimate.measured)
            if row.site.estimate else "",
        )
        for row in fold(sites)
    ]  # fmt: skip
    widths = [22, 3, 12, 10, 24, 9, 8]
    spare = max(0, min(shutil.get_terminal_size((100, 0)).columns, 200) - 100)
    for i, most in ((2, 20), (5, 18), (6, 18), (0, 40), (4, 80)):
        more = min(spare, most - widths[i])
        widths[i], spare = widths[i] + more, spare - more
    kept = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    lines = ([heads[i] for i in kept], *([row[i] for i in kept] for row in rows))
    head, *cells = [
        [_wrapped(x, widths[i]) for i, x in zip(kept, line, strict=True)] for line in lines
    ]
    text = tabulate(cells, head, tablefmt="simple", disable_numparse=True)
    about = any(site.estimate and not site.estimate.measured for site in sites)
    alone = any(site.estimate and not (site.fused or site.idle) for site in sites)
    notes = ["* about: by a roofline, not measured"] * about
    notes += ["us of an unfused GEMM: in cuBLAS, without the kernels around it"] * alone
    return "\n".join([text, *notes, *idle_lines(sites)])


def _wrapped(text: str, width: int) -> str:
    """``text`` in lines of ``width`` columns, which end at spaces or behind the dots of a path,
    never inside a name."""
    lines = [""]
    for part in re.findall(r" *(?:[^ .]|\.(?=\d))+\.?| *\.", text):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return "\n".join(lines)


def idle_lines(sites: Sequence[SiteReport]) -> list[str]:
    """One line that counts the weight gradients left out of a table; none if there are none."""
    count = sum(site.idle for site in sites)
    what = "weight gradients that have" if count > 1 else "weight gradient that has"
    return [f"and {count} {what} nothing to absorb"] if count else []


def general_path(path: str) -> str:
    """``model.layers.*.mlp.up_proj`` for ``model.layers.3.mlp.up_proj``; pairs name two modules.
    A path that is only a number stays."""
    return LAYER.sub("*", path, count=1)


def readable_bytes(count: float) -> str:
    """``8.4 MB``: three figures, decimal units."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    whole = count >= 99.5 or units[0] == "B"
    return f"{count:.0f} {units[0]}" if whole else f"{count:.3g} {units[0]}"


def shape_text(site: SiteReport) -> str:
    """``4096 x 8192 x 2048``: M, N, K."""
    return " x ".join(str(extent) for extent in site.shape)


def traffic_words(site: SiteReport) -> tuple[str, str]:
    """Bytes that one site moves, and a remark if fusing adds some: ("3 MB -> 2 MB", "")."""
    after = readable_bytes(site.bytes_after)
    if not site.fused:
        return after, ""
    more = "more than before" if site.bytes_after > site.bytes_before else ""
    return f"{readable_bytes(site.bytes_before)} -> {after}", more


def time_words(site: SiteReport) -> tuple[str, str]:
    """Expected microseconds, and what they are based on: ("16.2 -> 12.1", "measured")."""
    found = site.estimate
    if found is None:
        return "unknown", ""
    rests_on = GROUNDS[found.ground]
    if not site.fused and site.refusal is not None and site.refusal.code in TIMED:
        return "", "as the reason says"
    if not site.fused:
        return f"{found.unfused_us:.1f}", f"cuBLAS alone, {rests_on}"
    if found.fused_us is None:
        return "unknown", f"no kernel: {found.refusal.text if found.refusal else rests_on}"
    if found.fused_us > found.unfused_us:
        left = "the gate leaves it to cuBLAS" if found.refusal else "the gate was not asked"
        rests_on = f"{rests_on}; slower: {left}"
    return f"{found.unfused_us:.1f} -> {found.fused_us:.1f}", rests_on


_REPORTS: deque[GraphReport] = deque(maxlen=256)


def reports() -> list[GraphReport]:
    """Reports of the graphs compiled in this process, oldest first (the last 256).

    A graph that came out of torch's compile cache was not analysed again and has no report.
    """
    return list(_REPORTS)


def record(report: GraphReport) -> bool:
    """Keep ``report`` for :func:`reports`, once; True if it is new. A graph may come twice, because
    Inductor also hands the bodies of FlexAttention's calls to the passes, before their graph."""
    if any(known is report for known in _REPORTS):
        return False
    _REPORTS.append(report)
    return True


def replace(kept: list[GraphReport]) -> None:
    """Let :func:`reports` return ``kept``."""
    _REPORTS.clear()
    _REPORTS.extend(kept)


def forget() -> None:
    """Drop all reports (``torch._dynamo.reset()`` does not)."""
    _REPORTS.clear()
