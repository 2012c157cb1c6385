# SPDX-License-Identifier: Apache-2.0
"""What happened to each GEMM: plain records that debug output, the demo and users read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal

#: How a site runs, for people.
RUNS_AS = {"kernel": "kernel", "reference": "legal, plain ops", "unfused": "unfused"}
#: What a site's times rest on, for people.
GROUNDS = {
    "here": "measured here",
    "shipped": "measured",
    "roofline": "about: a roofline, not measured",
    "unknown": "a guess: no GPU of its generation was measured",
}
#: Codes of refusals that say: nothing after this GEMM is arithmetic on its result.
_IDLE = frozenset({"no-neighbours", "transposed", "graph-output", "not-read", "copy"})


@dataclass(frozen=True)
class Estimate:
    """Expected times on the graph's GPU, or an H100 where it is on none; nothing was run here.

    Attributes:
        unfused_us: cuBLAS and Inductor's elementwise kernels, microseconds.
        fused_us: the generated kernel; None where there can be none, or nothing is fused.
        ground: what the times rest on, a key of :data:`GROUNDS`.
        config: of the kernel, e.g. ``128x192:2x1:pp``; also where one is possible but would lose.
        refusal: why it would not run as a kernel there; None if it would.
    """

    unfused_us: float = 0.0
    fused_us: float | None = None
    ground: str = "roofline"
    config: str = ""
    refusal: Refusal | None = None


@dataclass(frozen=True)
class SiteReport:
    """One GEMM (or gate/up pair of GEMMs).

    Attributes:
        site: the path of the GEMM's module, e.g. ``model.layers.0.mlp.down_proj``; its node name in
            the graph where no module is known. Pairs name both.
        shape: (M, N, K); M is an int or a symbolic expression. N is one GEMM's N, also for pairs; K
            is that of all terms together where several GEMMs are summed in one.
        patterns: names of the patterns whose work it absorbed.
        absorbed: the graph ops that now run on its accumulator tile.
        bytes_before: bytes read and written by the GEMM and by one elementwise kernel after it
            that does what was absorbed, each tensor counted once a kernel (no cache, no retries).
        bytes_after: the same for the fused kernel, also where the program runs as plain ops
            (``how``), which move more; equal to ``bytes_before`` when not fused.
        role: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        stops: where the epilogue ended and why, ``what`` being the op; fused sites only.
        estimate: expected times; only ``coda_inductor.explain`` asks for them.
        how: ``"kernel"``, ``"reference"`` (expanded for Inductor) or ``"unfused"``.
        refusal: why it is not fused, or why not as a kernel; None otherwise.
        program: the epilogue program; None when not fused.
        config: tile and cluster shape of the kernel, e.g. ``128x192:2x1:pp``.
        fused_us, unfused_us: microseconds of the kernel, and of cuBLAS with Inductor's kernels;
            None where nothing is known.
        ground: what these rest on, a key of :data:`GROUNDS`; "" where nothing was asked.
    """

    site: str
    shape: tuple[object, int, int]
    patterns: tuple[str, ...] = ()
    absorbed: tuple[str, ...] = ()
    how: str = "unfused"
    refusal: Refusal | None = None
    program: EpilogueProgram | None = None
    config: str = ""
    fused_us: float | None = None
    unfused_us: float | None = None
    ground: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    role: str = "forward"
    stops: tuple[Refusal, ...] = ()
    estimate: Estimate | None = None

    @property
    def fused(self) -> bool:
        return self.how != "unfused"

    @property
    def idle(self) -> bool:
        """Is it a weight's gradient that has nothing to absorb, as almost all are?"""
        code = "" if self.fused or self.refusal is None else self.refusal.code
        return self.role == "weight gradient" and code in _IDLE

    @property
    def reason(self) -> str:
        """Why it is not fused, or why not as a kernel, for people; empty otherwise."""
        return "" if self.refusal is None else self.refusal.text

    @property
    def stopped(self) -> tuple[str, ...]:
        """Where the epilogue ended and why, as ``"op: reason"``."""
        return tuple(f"{stop.what}: {stop.text}" for stop in self.stops)

    @property
    def times(self) -> str:
        """``1016 of 1230, measured here``: its kernel's microseconds of the unfused way's, and what
        says so. Empty where no kernel runs."""
        if self.how != "kernel" or self.fused_us is None or self.unfused_us is None:
            return ""
        return f"{self.fused_us:.0f} of {self.unfused_us:.0f}, {GROUNDS[self.ground]}"

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic that a kernel does without (0 when not fused); where ``how`` is
        ``"reference"`` no kernel runs, and they are not saved."""
        return self.bytes_before - self.bytes_after


@dataclass
class Float8Layers:
    """What ``options["fp8"]`` makes of the linear layers, of one graph or of several.

    Attributes:
        recipe: the option's; "" without it.
        patterns: those of ``fp8_skip``, where they are the user's.
        quantized: the layers that multiply in FP8, by their modules' paths.
        kept: those that never do.
        named: the patterns that name one of them.
    """

    recipe: str = ""
    patterns: tuple[str, ...] = ()
    quantized: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)

    def add(self, other: Float8Layers) -> None:
        """Take in the layers of another graph."""
        self.recipe, self.patterns = other.recipe, other.patterns
        self.quantized |= other.quantized
        self.kept = (self.kept | other.kept) - self.quantized
        self.named |= other.named

    @property
    def unmatched(self) -> list[str]:
        """The patterns that name none of the layers: misspelt, or of layers in other graphs."""
        return [pattern for pattern in self.patterns if pattern not in self.named]

    @property
    def summary(self) -> str:
        """``FP8 (rowwise): 14 of 15 linear layers; fp8_skip: 'down_prj' names none of them``; empty
        where there is no such layer."""
        layers = self.quantized | self.kept
        if not layers:
            return ""
        said = f"FP8 ({self.recipe}): {len(self.quantized)} of {len(layers)} linear layers"
        missed = ", ".join(map(repr, self.unmatched))
        verb = "names" if len(self.unmatched) == 1 else "name"
        return f"{said}; fp8_skip: {missed} {verb} none of them" if missed else said


@dataclass
class GraphReport:
    """One compiled graph: its GEMMs, and what was recognized beside them and stays as it was.

    Attributes:
        float8: what became of the linear layers with ``options["fp8"]``.
    """

    name: str
    sites: list[SiteReport] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    folder: str = ""
    float8: Float8Layers = field(default_factory=Float8Layers)

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
        """``15 of 29 GEMMs fused``; where no kernel runs, what is legal and why it runs as plain
        ops."""
        if not self.sites:
            return "no GEMM in this graph"
        plain = [site for site in self.sites if site.how == "reference"]
        said = []
        if self.kernels or not plain:
            said.append(f"{self.kernels} of {len(self.sites)} GEMMs fused")
        if plain:
            legal = f"{len(plain)} of {len(self.sites)} GEMMs"
            said.append(f"{legal}: legal, runs as plain ops here ({plain[0].reason})")
        return ", ".join(said)

    def table(self) -> str:
        """The GEMMs as a text table: site, pass, shape, patterns, absorbed ops, bytes saved or
        reason. Weight gradients with nothing to absorb are one line below it. Where no kernel runs,
        the bytes are those that one would move less."""
        rows = [
            (
                s.site,
                s.role,
                "x".join(str(v) for v in s.shape),
                ", ".join(s.patterns),
                RUNS_AS[s.how],
                ", ".join(s.absorbed),
                less(s.bytes_saved) if s.fused else "",
                s.times,
                s.reason,
            )
            for s in self.sites
            if not s.idle
        ]
        saved = "MB saved" if self.kernels else "MB less as kernel"
        heads = ["GEMM", "pass", "M x N x K", "patterns", "runs as", "absorbed", saved, "us, by",
                 "why not"]  # fmt: skip
        widths = [42, 8, 18, 20, 10, 40, 9, 20, 40]
        shown = [list(row) for row in rows]
        if not any(row[7] for row in rows):
            shown = [[*row[:7], row[8]] for row in rows]
            heads, widths = heads[:7] + heads[8:], widths[:7] + widths[8:]
        text = tabulate(shown, headers=heads, maxcolwidths=widths, tablefmt="simple")
        lines = [text, *idle_lines(self.sites)]
        lines += [self.float8.summary] if self.float8.summary else []
        lines += [f"near miss: {m}" for m in self.near_misses]
        return "\n".join(lines)


def less(saved: int) -> str:
    """Megabytes; ``0.13 more`` where a site moves more fused than unfused."""
    return f"{saved / 1e6:.2f}" if saved >= 0 else f"{-saved / 1e6:.2f} more"


def idle_lines(sites: Sequence[SiteReport]) -> list[str]:
    """One line that counts the weight gradients left out of a table; none if there are none."""
    count = sum(site.idle for site in sites)
    what = "weight gradients that have" if count > 1 else "weight gradient that has"
    return [f"and {count} {what} nothing to absorb"] if count else []


_REPORTS: deque[GraphReport] = deque(maxlen=256)


def reports() -> list[GraphReport]:
    """Reports of the graphs compiled in this process, oldest first (the last 256).

    A graph that came out of torch's compile cache was not analysed again and has no report.
    """
    return list(_REPORTS)


def record(report: GraphReport) -> bool:
    """Keep ``report`` for :func:`reports`, once: Inductor hands the bodies of FlexAttention's calls
    to the passes too, one by one before the graph that they are in. True if it is new."""
    if any(known is report for known in _REPORTS):
        return False
    _REPORTS.append(report)
    return True


def forget() -> None:
    """Drop all reports (``torch._dynamo.reset()`` does not)."""
    _REPORTS.clear()
