# SPDX-License-Identifier: Apache-2.0
"""Reports of GEMMs as a text table, and in words that the page of ``explain`` uses too."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    from coda_inductor.report import SiteReport

#: The first number in a module's path, except at its end: the layer.
LAYER = re.compile(r"(?<![^.])\d+(?=\.)")
#: The same in a sentence, also at the end of a path.
_LAYER_IN_TEXT = re.compile(r"(?<=[A-Za-z_]\.)\d+\b")
#: How a site runs, for people.
RUNS_AS = {"kernel": "kernel", "reference": "legal, plain ops", "unfused": "unfused"}
#: Codes of reasons that tell both times of a site.
TIMED = ("expected-slower", "measured-slower")
#: The basis of a site's times, for people.
GROUNDS = {
    "here": "measured here",
    "shipped": "measured",
    "roofline": "about: a roofline, not measured",
    "unknown": "a guess: no GPU of its generation was measured, an H200's constants",
}


@dataclass(frozen=True)
class Row:
    """Sites that differ only in the layer. ``name`` has ``*`` instead of the layer's number."""

    name: str
    sites: tuple[SiteReport, ...]

    @property
    def site(self) -> SiteReport:
        return self.sites[0]

    @property
    def times(self) -> int:
        return len(self.sites)

    @property
    def reason(self) -> str:
        """The first site's reason; if there are several sites, without the numbers of layers."""
        return general_text(self.site.reason) if self.times > 1 else self.site.reason

    @property
    def layers(self) -> str:
        return ", ".join(m[0] for s in self.sites if (m := LAYER.search(s.site)))


def fold(sites: Sequence[SiteReport]) -> list[Row]:
    """Rows of equal sites, in the order of the first site, without idle weight gradients."""
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
    """A text table of GEMMs, as wide as the terminal, with equal layers in one row and without
    empty columns; times are for ``gpu``. Idle weight gradients and reasons that several
    rows share are printed once, below the table. Without kernels, the bytes are those that a kernel
    would move. A narrow terminal shows either times or bytes."""
    heads = ["GEMM", "x", "M x N x K", "runs as", "absorbed, or why not", "bytes",
             f"us on {gpu}" if gpu else "us"]  # fmt: skip
    folded = fold(sites)
    counts = Counter(row.reason for row in folded if not row.site.fused and len(row.reason) > 60)
    shared = [reason for reason, times in counts.items() if times > 2]
    short = {why: f"{why.split(': ')[0]} ({i})" for i, why in enumerate(shared, 1) if ": " in why}
    rows = [
        (
            row.name, str(row.times), shape_text(row.site),
            f"{RUNS_AS[row.site.how]}, {row.site.role}",
            ": ".join(filter(None, map(", ".join, (row.site.patterns, row.site.absorbed))))
            if row.site.fused else short.get(row.reason, row.reason),
            " ".join(traffic_words(row.site)),
            (us := time_words(row.site)[0]) + "*" * (bool(us) and not row.site.estimate.measured)
            if row.site.estimate else "",
        )
        for row in folded
    ]  # fmt: skip
    columns = shutil.get_terminal_size((100, 0)).columns
    widths = [22, 3, 12, 10, 24, 9, 8] if columns >= 100 else [20, 3, 11, 10, 18, 8, 8]
    spare = max(0, min(columns, 200) - 100)
    for i, most in ((2, 20), (5, 18), (6, 18), (0, 40), (4, 80)):
        more = min(spare, most - widths[i])
        widths[i], spare = widths[i] + more, spare - more
    shown = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    if columns < 100 and {5, 6} <= {*shown}:
        shown.remove(5)
    head = [_wrapped(heads[i], widths[i] - 2) for i in shown]  # tabulate leaves two spaces there
    cells = [[_wrapped(row[i], widths[i]) for i in shown] for row in rows]
    text = tabulate(cells, head, tablefmt="simple", disable_numparse=True)
    about = any(site.estimate and not site.estimate.measured for site in sites)
    alone = any(site.estimate and not (site.fused or site.idle) for site in sites)
    notes = [f"({i}) {why}" for i, why in enumerate(shared, 1) if why in short]
    notes += ["* about: by a roofline, not measured"] * about
    notes += ["us of an unfused GEMM: in cuBLAS, without the kernels around it"] * alone
    return "\n".join([text, *notes, *idle_lines(sites)])


def fitted(text: str) -> str:
    """A paragraph as wide as the terminal; unchanged without one, or if it contains columns."""
    columns = shutil.get_terminal_size((0, 0)).columns
    if len(text) <= columns or columns < 40 or "   " in text.strip():
        return text
    indent = " " * 5 if text.startswith("  ->") else ""
    return textwrap.fill(
        text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _wrapped(text: str, width: int) -> str:
    """``text`` in lines of ``width`` columns, split at spaces or after the dots of a path."""
    lines = [""]
    for part in re.findall(r" *(?:[^ .]|\.(?=\d))+\.?| *\.", text):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return "\n".join(lines)


def main_reason(sites: Sequence[SiteReport]) -> str:
    """``28 because: no op beside it fuses``: the most frequent reason, with the numbers of the
    first such site; idle weight gradients do not count beside others. Empty without a reason."""
    left = [s for s in sites if s.reason and not s.idle] or [s for s in sites if s.reason]
    kinds = [re.sub(r"\d+(\.\d+)?", "*", site.reason) for site in left]
    if not kinds:
        return ""
    kind, times = Counter(kinds).most_common(1)[0]
    text = general_text(left[kinds.index(kind)].reason)
    return f"all because: {text}" if times == len(sites) > 1 else f"{times} because: {text}"


def idle_lines(sites: Sequence[SiteReport]) -> list[str]:
    """One line that counts the weight gradients left out of a table; none if there are none."""
    count = sum(site.idle for site in sites)
    noun = "weight gradients that have" if count > 1 else "weight gradient that has"
    return [f"and {count} {noun} nothing to absorb"] if count else []


def general_path(path: str) -> str:
    """``model.layers.*.mlp.up_proj`` for ``model.layers.3.mlp.up_proj``; pairs name two modules.
    A path that is only a number stays."""
    return LAYER.sub("*", path, count=1)


def general_text(text: str) -> str:
    """A sentence that names modules, with ``*`` for the numbers of layers."""
    return _LAYER_IN_TEXT.sub("*", text)


def readable_bytes(count: float) -> str:
    """``8.4 MB``: three digits, decimal units."""
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
    """(bytes before and after, a remark if fusing adds bytes) of one site: ("3 MB -> 2 MB", "")."""
    after = readable_bytes(site.bytes_after)
    if not site.fused:
        return after, ""
    more = "more than before" if site.bytes_after > site.bytes_before else ""
    return f"{readable_bytes(site.bytes_before)} -> {after}", more


def time_words(site: SiteReport) -> tuple[str, str]:
    """(expected microseconds, the source of these times): ("16.2 -> 12.1", "measured")."""
    choice = site.estimate
    if choice is None:
        return "unknown", ""
    ground = GROUNDS[choice.ground]
    if not site.fused and site.refusal is not None and site.refusal.code in TIMED:
        return "", "as the reason says"
    if not site.fused:
        return f"{choice.unfused_us:.1f}", f"cuBLAS alone, {ground}"
    if choice.fused_us is None:
        return "unknown", f"no kernel: {choice.refusal.text if choice.refusal else ground}"
    if choice.fused_us > choice.unfused_us:
        left = "the gate leaves it to cuBLAS" if choice.refusal else "the gate was not asked"
        ground = f"{ground}; slower: {left}"
    return f"{choice.unfused_us:.1f} -> {choice.fused_us:.1f}", ground
