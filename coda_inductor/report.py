# SPDX-License-Identifier: Apache-2.0
"""Reports of each GEMM: plain records for debug output, the demo and users."""

from collections import Counter, deque
from dataclasses import dataclass, field

from coda_inductor import compat
from coda_inductor.log import say_once
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal
from coda_inductor.table import fold, main_reason, sites_table


@dataclass(frozen=True)
class Choice:
    """How a site runs, or may run.

    Attributes:
        how: ``"kernel"``, ``"reference"`` (plain ops for Inductor) or ``"unfused"``.
        config: the kernel's config, e.g. ``128x192:2x1:pp``; also if a kernel is possible but
            slower.
        refusal: the reason if it does not run as a kernel.
        fused_us: expected microseconds of the kernel; None without an estimate.
        unfused_us: the same for cuBLAS and Inductor's elementwise kernels; 0 without an estimate.
        ground: the source of these times: "here" (measured by this user), "shipped" (measured),
            "roofline", or "unknown" (a GPU of a generation without constants).
    """

    how: str
    config: str = ""
    refusal: Refusal | None = None
    fused_us: float | None = None
    unfused_us: float = 0.0
    ground: str = "roofline"

    @property
    def measured(self) -> bool:
        """Were the choice's times measured?"""
        return self.ground in ("here", "shipped")


#: Nothing is known of it.
UNFUSED = Choice("unfused")


@dataclass
class SiteReport:
    """One GEMM (or gate/up pair of GEMMs). It stands on the call of its kernel too.

    Attributes:
        site: the path of the GEMM's module, e.g. ``model.layers.0.mlp.down_proj``; its node name in
            the graph if the graph names no module. Pairs name both.
        shape: (M, N, K); M may be symbolic. N is one GEMM's N, also for pairs; K is the total where
            several GEMMs are summed in one.
        patterns: names of the patterns whose ops it absorbed.
        absorbed: the graph ops that now run on its accumulator tile.
        bytes_before: bytes read and written by the GEMM and by one elementwise kernel for the
            absorbed ops; each kernel counts a tensor once.
        bytes_after: the same for the fused kernel, also where the program runs as plain ops, which
            move more; equal to ``bytes_before`` when not fused.
        role: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        stops: the ops where the epilogue ended, with reasons; fused sites only.
        choice: how it runs, and the reason if not as a kernel.
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

    def __deepcopy__(self, _memo: object) -> "SiteReport":
        return self  # torch copies graphs, whose calls keep their reports

    @property
    def how(self) -> str:
        """How the site runs: ``"kernel"``, ``"reference"`` (for Inductor) or ``"unfused"``."""
        return self.choice.how

    @property
    def config(self) -> str:
        """Tile and cluster shape of the kernel, e.g. ``128x192:2x1:pp``."""
        return self.choice.config

    @property
    def refusal(self) -> Refusal | None:
        """The reason why the site is not fused, or does not run as a kernel; None otherwise."""
        return self.choice.refusal

    @property
    def estimate(self) -> Choice | None:
        """The choice if it has expected times, else None: kernels have them, and in
        ``coda_inductor.explain`` all GEMMs."""
        return self.choice if self.choice.unfused_us else None

    @property
    def fused(self) -> bool:
        return self.how != "unfused"

    @property
    def idle(self) -> bool:
        """Is it a weight gradient with nothing to absorb, as almost all are?"""
        code = "" if self.fused or self.refusal is None else self.refusal.code
        return self.role == "weight gradient" and code == "no-neighbours"

    @property
    def reason(self) -> str:
        """The reason why the site is not fused, or not a kernel, as text; empty otherwise."""
        return "" if self.refusal is None else self.refusal.text

    @property
    def stopped(self) -> tuple[str, ...]:
        """The ops where the epilogue ended, as ``"op: reason"``."""
        return tuple(f"{stop.what}: {stop.text}" for stop in self.stops)

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic that a kernel saves, if it runs; 0 if not fused."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class MemoryReport:
    """The memory that a graph keeps for its backward pass, under a limit.

    Attributes:
        kept: bytes that the forward pass leaves, inputs and outputs of the graph apart.
        before: the same without recomputation.
        again: tensors that are computed again.
        ms: the expected time of that.
        peak: the expected peak of memory in bytes, beyond the step's inputs.
        held: the same if the caller holds the forward pass's outputs until the backward pass ends.
    """

    kept: int
    before: int
    again: int
    ms: float
    peak: int
    held: int

    def __str__(self) -> str:
        kept, before = map(size_text, (self.kept, self.before))
        peak = f"peak about {size_text(self.peak)} over its inputs"
        if self.held > 1.01 * self.peak:
            peak += f", {size_text(self.held)} while the caller holds its outputs (logits)"
        note = f" in place of {before}, computes {self.again} tensors again" if self.again else ""
        time = f" (about {self.ms:.1f} ms)" if self.again else ""
        return f"keeps {kept} for the backward pass{note}{time}; {peak}"


def size_text(number: int) -> str:
    """``9.38 GiB``; small sizes in MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**28 else f"{number / 2**20:.2f} MiB"


@dataclass
class GraphReport:
    """The report of one compiled graph: its GEMMs, idioms that were not rewritten, the count of
    each rewrite, and, with a limit of memory, the bytes kept for the backward pass. ``from_cache``:
    torch had the graph in its cache, and this is the report of when it was compiled."""

    name: str
    sites: list[SiteReport] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    folder: str = ""
    memory: MemoryReport | None = None
    fired: Counter[str] = field(default_factory=Counter)
    from_cache: bool = field(default=False, compare=False)

    @property
    def near_misses(self) -> list[str]:
        """The refusals as lines of text: ``rms_norm at model.norm: no GEMM reads it``."""
        return [str(refusal) for refusal in self.refusals]

    @property
    def bytes_saved(self) -> int:
        return sum(site.bytes_saved for site in self.sites)

    @property
    def kernels(self) -> int:
        """The number of GEMMs that run as a generated kernel."""
        return sum(site.how == "kernel" for site in self.sites)

    @property
    def summary(self) -> str:
        """``15 of 29 GEMMs fused``; if none is, the most frequent reason; without kernels, how many
        may be, and why no kernel runs."""
        if not self.sites:
            return "no GEMM in this graph"
        plain = [site for site in self.sites if site.how == "reference"]
        parts = []
        if self.kernels or not plain:
            parts.append(f"{self.kernels} of {len(self.sites)} GEMMs fused")
        if plain:
            legal = f"{len(plain)} of {len(self.sites)} GEMMs"
            parts.append(f"{legal} may be fused, and run as plain ops: {plain[0].reason}")
        elif not self.kernels and (why := main_reason(self.sites)):
            parts.append(why)
        return ", ".join(parts)

    def table(self) -> str:
        """The table of GEMMs, near misses and, with debugging, the paths of kernels."""
        lines = ["from torch's compile cache, as it was compiled"] if self.from_cache else []
        lines += [f"memory: {self.memory}"] if self.memory is not None else []
        lines += [f"near miss: {m}" for m in self.near_misses]
        for row in fold(self.sites) if self.folder else ():
            if row.site.program is not None:
                lines.append(f"{row.name}: {self.folder}/kernels/{row.site.program.key}.py")
        return "\n".join([sites_table(self.sites), *lines])


_REPORTS: deque[GraphReport] = deque(maxlen=256)


def reports() -> list[GraphReport]:
    """Reports of the graphs compiled in this process, oldest first (the last 256).

    A graph from torch's compile cache has the report of when it was compiled, which is in our own
    cache folder. A warning says so if there are no reports at all.
    """
    counters = compat.counters  # imports Dynamo, which compile workers do not need
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    if not _REPORTS and hits + counters["inductor"]["fxgraph_cache_hit"]:
        say_once(
            "no reports: all graphs came from torch's compile cache, and CODA_CACHE_DIR has no "
            "report of them; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles them again"
        )
    return kept()


def kept() -> list[GraphReport]:
    """What :func:`reports` returns, without its warning."""
    return list(_REPORTS)


def record(report: GraphReport) -> bool:
    """Keep ``report`` for :func:`reports`, once. Returns True if it is new. A graph may come twice,
    because Inductor also passes the bodies of FlexAttention's calls to us, before their graph."""
    if any(other is report for other in _REPORTS):
        return False
    _REPORTS.append(report)
    return True


def replace(graphs: list[GraphReport]) -> None:
    """Let :func:`reports` return the graphs in ``graphs``."""
    _REPORTS.clear()
    _REPORTS.extend(graphs)


def forget() -> None:
    """Drop all reports (``torch._dynamo.reset()`` does not)."""
    _REPORTS.clear()
