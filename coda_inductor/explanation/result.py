# SPDX-License-Identifier: Apache-2.0
"""The result of :func:`coda_inductor.explain`: plain attributes, a table, a page."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from coda_inductor import table
from coda_inductor.gpu import H100
from coda_inductor.refusal import Refusal
from coda_inductor.report import SiteReport

#: Codes of sites that may be fused, but are not expected to be faster.
SLOWER = frozenset({"expected-slower", "measured-slower", "statistics-only"})


@dataclass
class Explanation:
    """The effect of the backend on a model.

    Attributes:
        name: the model's class.
        device: the type of the tensors' device.
        training: does the model have a backward pass here?
        gpu: the GPU of the times and decisions, "an H200".
        sites: a report for every GEMM (or group of GEMMs that is one kernel), in order.
        near_misses: idioms that were recognized but not rewritten, with the reasons of the passes.
        saved_bytes_before: what torch.compile keeps for the backward pass, parameters and inputs
            apart; 0 without one.
        saved_bytes_after: the same with this backend.
        notes: sentences that a reader needs to understand the rest.
    """

    name: str
    device: str
    training: bool
    gpu: str = H100.article
    sites: list[SiteReport] = field(default_factory=list)
    near_misses: list[Refusal] = field(default_factory=list)
    saved_bytes_before: int = 0
    saved_bytes_after: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def fused(self) -> list[SiteReport]:
        return [site for site in self.sites if site.fused]

    @property
    def unfused(self) -> list[Refusal]:
        """Every GEMM that is not fused, with the first reason."""
        return _refusals(site for site in self.sites if not site.fused)

    @property
    def legal(self) -> int:
        """The number of GEMMs that could be fused, but are not expected to be faster."""
        left = (site for site in self.sites if site.refusal and site.refusal.code in SLOWER)
        return sum(gemm_count(site) for site in left if not site.fused)

    @property
    def gemms(self) -> int:
        return sum(map(gemm_count, self.sites))

    @property
    def gemms_fused(self) -> int:
        return sum(map(gemm_count, self.fused))

    @property
    def bytes_before(self) -> int:
        """Calculated memory traffic of all GEMMs, and of the ops that they absorb, in one call or
        training step under plain torch.compile (``SiteReport.bytes_before``)."""
        return sum(site.bytes_before for site in self.sites)

    @property
    def bytes_after(self) -> int:
        """The same with this backend."""
        return sum(site.bytes_after for site in self.sites)

    @property
    def summary(self) -> str:
        """One or two sentences with the main numbers."""
        if not self.gemms:
            return "There is no GEMM in it, so there is nothing to fuse."
        if not self.fused:
            text = f"{self.gemms} GEMM{'s' * (self.gemms > 1)}, of which none absorbs anything"
            why = table.main_reason(self.sites)
            return f"{text}{self._legal}{why and ', '}{why}."
        ops = sum(len(site.absorbed) for site in self.fused)
        which = f"{self.gemms_fused} of {self.gemms} GEMMs"
        text = f"{which} absorb {ops} ops{self._legal}; "
        saved = table.readable_bytes(self.bytes_before - self.bytes_after)
        step = "training step" if self.training else "call"
        before, after, kept, still = map(table.readable_bytes, (
            self.bytes_before, self.bytes_after, self.saved_bytes_before, self.saved_bytes_after
        ))  # fmt: skip
        if self.bytes_before > self.bytes_after:
            text += f"{saved} of {before} of the GEMMs' memory traffic per {step} gone"
        else:
            text += f"the GEMMs' memory traffic per {step} rises from {before} to {after}"
        text += f"; kept for backward {kept} -> {still}" if self.training else ""
        return f"{text}."

    @property
    def _legal(self) -> str:
        return f" ({self.legal} more may, but are not expected to be faster)" if self.legal else ""

    @property
    def rows(self) -> list[table.Row]:
        """The GEMMs with identical layers folded, except those in :attr:`idle`."""
        return table.fold(self.sites)

    @property
    def advised(self) -> dict[str, list[Refusal]]:
        """Refusals by code and text without numbers: those with a remedy first, then the most."""
        left = [site for site in self.sites if not site.fused and not site.idle]
        groups: dict[str, list[Refusal]] = {}
        for miss in (*self.near_misses, *_refusals(left)):
            key = f"{miss.code}: {re.sub('[0-9]+', '*', miss.text)}"
            groups.setdefault(key, []).append(miss)
        return dict(sorted(groups.items(), key=lambda g: (not g[1][0].remedy.possible, -len(g[1]))))

    def __str__(self) -> str:
        gemms = table.sites_table(self.sites, self.gpu)
        summary = self.summary.replace("; ", "\n  ")
        lines = [f"{self.name} on {self.device}: {summary}", *self.notes, "", gemms]
        same: dict[str, list[str]] = {}  # reasons by what to do about them
        for misses in self.advised.values():
            reasons = same.setdefault(misses[0].remedy.text, [])
            reasons.append(f"{locations(misses)}: {common_text(misses)}")
        for advice, reasons in same.items():
            lines += ["", *reasons, f"  -> {advice}"]
        return "\n".join(table.fitted(line) for line in "\n".join(lines).split("\n"))

    def __repr__(self) -> str:
        return f"<Explanation of {self.name}: {self.summary}>"

    def html(self) -> str:
        """One self-contained page: no scripts, fonts or images from elsewhere."""
        from coda_inductor.explanation.page import page

        return page(self)

    def _repr_html_(self) -> str:
        """The page in a separate frame, so that its styles do not affect a notebook."""
        frame = 'style="width:100%;height:760px;border:0" title="coda_inductor explanation"'
        return f'<iframe {frame} srcdoc="{escape(self.html(), quote=True)}"></iframe>'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`html` to ``path``; returns the path."""
        target = Path(path)
        target.write_text(self.html(), encoding="utf-8")
        return target


def gemm_count(site: SiteReport) -> int:
    """The number of the model's GEMMs in a site: the names of pairs and sums list each GEMM."""
    return site.site.count(" + ") + 1


def _refusals(sites: Iterable[SiteReport]) -> list[Refusal]:
    return [site.refusal.at("gemm", site.site) for site in sites if site.refusal]


def common_text(misses: Sequence[Refusal]) -> str:
    """The text of the first refusal, with "(numbers of the first one)" if others differ in them."""
    if len(misses) == 1:
        return misses[0].text
    first, *others = dict.fromkeys(table.general_text(miss.text) for miss in misses)
    return f"{first} (numbers of the first one)" if others else first


def locations(misses: Sequence[Refusal]) -> str:
    """``lm_head, rms_norm at model.layers.*.norm (x 16)``: the places, with layers folded."""
    counts: dict[tuple[str, str], list[str]] = {}
    for miss in misses:
        named = miss.what != "gemm" and miss.subject != miss.where
        subject = f"{miss.what} at " if named else ""
        counts.setdefault((subject, table.general_path(miss.where)), []).append(miss.where)
    return ", ".join(
        f"{subject}{times[0]}" if len(times) == 1 else f"{subject}{path} (x {len(times)})"
        for (subject, path), times in counts.items()
    )
