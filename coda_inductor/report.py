"""What happened to each GEMM: plain records that debug output, the demo and users read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tabulate import tabulate

from coda_inductor.program import EpilogueProgram


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
        bytes_saved: bytes of memory traffic that no longer happen (0 when not fused).
        how: ``"kernel"``, ``"reference"`` (expanded for Inductor) or ``"unfused"``.
        reason: why it is not fused, or why not as a kernel; empty otherwise.
        program: the epilogue program; None when not fused.
        config: tile and cluster shape of the kernel, e.g. ``128x192:2x1:pp``.
    """

    site: str
    shape: tuple[object, int, int]
    patterns: tuple[str, ...] = ()
    absorbed: tuple[str, ...] = ()
    bytes_saved: int = 0
    how: str = "unfused"
    reason: str = ""
    program: EpilogueProgram | None = None
    config: str = ""

    @property
    def fused(self) -> bool:
        return self.how != "unfused"


@dataclass
class GraphReport:
    """One compiled graph: its GEMMs and the near misses of the raise pass."""

    name: str
    sites: list[SiteReport] = field(default_factory=list)
    near_misses: list[str] = field(default_factory=list)
    folder: str = ""

    @property
    def bytes_saved(self) -> int:
        return sum(site.bytes_saved for site in self.sites)

    def table(self) -> str:
        """The GEMMs as a text table: site, shape, patterns, absorbed ops, bytes saved or reason."""
        rows = [
            (
                s.site,
                "x".join(str(v) for v in s.shape),
                ", ".join(s.patterns),
                s.how,
                ", ".join(s.absorbed),
                f"{s.bytes_saved / 1e6:.2f}" if s.fused else "",
                s.reason,
            )
            for s in self.sites
        ]
        heads = ["GEMM", "M x N x K", "patterns", "runs as", "absorbed", "MB saved", "why not"]
        widths = [42, 18, 20, 10, 40, 9, 40]
        text = tabulate(rows, headers=heads, maxcolwidths=widths, tablefmt="simple")
        misses = "".join(f"\nnear miss: {miss}" for miss in self.near_misses)
        return f"{text}{misses}"


_REPORTS: deque[GraphReport] = deque(maxlen=256)


def reports() -> list[GraphReport]:
    """Reports of the graphs compiled in this process, oldest first (the last 256).

    A graph that came out of torch's compile cache was not analysed again and has no report.
    """
    return list(_REPORTS)


def record(report: GraphReport) -> None:
    """Keep ``report`` for :func:`reports`."""
    _REPORTS.append(report)


def forget() -> None:
    """Drop all reports (``torch._dynamo.reset()`` does not)."""
    _REPORTS.clear()
