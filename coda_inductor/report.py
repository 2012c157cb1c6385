# SPDX-License-Identifier: Apache-2.0
"""Reports of each GEMM: plain records for debug output, the demo and users."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from coda_inductor import compat
from coda_inductor.log import say_once
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal
from coda_inductor.table import fold, sites_table


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
        """The choice, if it has expected times: kernels have, and in ``coda_inductor.explain`` all
        GEMMs."""
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
    """The memory that a graph keeps for its backward pass, under a limit.

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
        kept, before, peak = map(size_text, (self.kept, self.before, self.peak))
        note = f" in place of {before}, computes {self.again} tensors again" if self.again else ""
        time = f" (about {self.ms:.1f} ms)" if self.again else ""
        return f"keeps {kept} for the backward pass{note}{time}; peak about {peak} over its inputs"


def size_text(number: int) -> str:
    """``9.38 GiB``; small sizes in MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**28 else f"{number / 2**20:.2f} MiB"


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
        parts = []
        if self.kernels or not plain:
            parts.append(f"{self.kernels} of {len(self.sites)} GEMMs fused")
        if plain:
            legal = f"{len(plain)} of {len(self.sites)} GEMMs"
            parts.append(f"{legal} may be fused, and run as plain ops: {plain[0].reason}")
        return ", ".join(parts)

    def table(self) -> str:
        """:func:`sites_table` of the GEMMs, near misses and, with debugging, kernels' files."""
        lines = [f"memory: {self.memory}"] if self.memory is not None else []
        lines += [f"near miss: {m}" for m in self.near_misses]
        for row in fold(self.sites) if self.folder else ():
            if row.site.program is not None:
                lines.append(f"{row.name}: {self.folder}/kernels/{row.site.program.key}.py")
        return "\n".join([sites_table(self.sites), *lines])


_REPORTS: deque[GraphReport] = deque(maxlen=256)


def reports() -> list[GraphReport]:
    """Reports of the graphs compiled in this process, oldest first (the last 256).

    A graph that came out of torch's compile cache was not analysed again and has no report; one
    warning says so if there are no reports at all.
    """
    counters = compat.counters  # imports Dynamo, which compile workers do not need
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    if not _REPORTS and hits + counters["inductor"]["fxgraph_cache_hit"]:
        say_once(
            "no reports: all graphs came from torch's compile cache; "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles them again"
        )
    return list(_REPORTS)


def record(report: GraphReport) -> bool:
    """Keep ``report`` for :func:`reports`, once; True if it is new. A graph may come twice, because
    Inductor also hands the bodies of FlexAttention's calls to the passes, before their graph."""
    if any(other is report for other in _REPORTS):
        return False
    _REPORTS.append(report)
    return True


def replace(graphs: list[GraphReport]) -> None:
    """Let :func:`reports` return ``graphs``."""
    _REPORTS.clear()
    _REPORTS.extend(graphs)


def forget() -> None:
    """Drop all reports (``torch._dynamo.reset()`` does not)."""
    _REPORTS.clear()
