# SPDX-License-Identifier: Apache-2.0
"""What :func:`coda_inductor.explain` returns: plain attributes, a table, a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tabulate import tabulate

from coda_inductor.explanation.block import Block
from coda_inductor.explanation.folding import Row, fold, general_path, general_reason
from coda_inductor.explanation.naming import readable_bytes, shape_text
from coda_inductor.explanation.remedies import Remedy, remedy
from coda_inductor.report import SiteReport


@dataclass(frozen=True)
class NearMiss:
    """A place that was not rewritten or fused: the first side condition that failed, and what to
    do about it. ``what`` is a pattern's name, or ``"gemm"``."""

    what: str
    where: str
    reason: str

    @property
    def remedy(self) -> Remedy:
        return remedy(self.reason)


@dataclass(frozen=True)
class Saved:
    """A tensor that the forward pass keeps for the backward; parameters and inputs are not listed.

    ``where`` is the module that computes it, ``name`` its name in the graph.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Totals:
    """Kernels of one call or training step, and the bytes that they move (a model, see
    ``coda_inductor.explanation.kernels``)."""

    kernels: int = 0
    bytes: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.kernels + other.kernels, self.bytes + other.bytes)


@dataclass
class Explanation:
    """What the backend does with a model.

    Attributes:
        name: the model's class.
        device: the type of the tensors' device.
        training: is there a backward pass in it?
        sites: a report for every GEMM (or group of GEMMs that is one kernel), in order.
        near_misses: idioms that were recognized but not rewritten, as the passes saw them.
        before: kernels and bytes under plain torch.compile.
        after: the same with this backend.
        saved_before: what torch.compile keeps for the backward pass; empty without one.
        saved_after: the same with this backend.
        blocks: (before, after) of one repeated block, forward and then backward.
        notes: what a reader must know to read the rest rightly.
    """

    name: str
    device: str
    training: bool
    sites: list[SiteReport] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    before: Totals = field(default_factory=Totals)
    after: Totals = field(default_factory=Totals)
    saved_before: list[Saved] = field(default_factory=list)
    saved_after: list[Saved] = field(default_factory=list)
    blocks: list[tuple[Block, Block]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fused(self) -> list[SiteReport]:
        return [site for site in self.sites if site.fused]

    @property
    def unfused(self) -> list[NearMiss]:
        """Every GEMM that is not fused, with the first reason."""
        return [NearMiss("gemm", s.site, s.reason) for s in self.sites if not s.fused]

    @property
    def gemms(self) -> int:
        return sum(map(gemm_count, self.sites))

    @property
    def gemms_fused(self) -> int:
        return sum(map(gemm_count, self.fused))

    @property
    def bytes_before(self) -> int:
        return self.before.bytes

    @property
    def bytes_after(self) -> int:
        return self.after.bytes

    @property
    def saved_bytes_before(self) -> int:
        return sum(tensor.bytes for tensor in self.saved_before)

    @property
    def saved_bytes_after(self) -> int:
        return sum(tensor.bytes for tensor in self.saved_after)

    @property
    def summary(self) -> str:
        """One sentence with the numbers."""
        if not self.fused:
            return f"None of {self.gemms} GEMMs absorbed anything."
        ops = sum(len(site.absorbed) for site in self.fused)
        gone = self.bytes_before - self.bytes_after
        step = "training step" if self.training else "call"
        text = f"{self.gemms_fused} of {self.gemms} GEMMs absorbed {ops} ops; "
        before, after = readable_bytes(self.bytes_before), readable_bytes(self.bytes_after)
        if gone > 0:
            text += f"{readable_bytes(gone)} of {before} of memory traffic per {step} gone"
        else:
            text += f"memory traffic per {step} rises from {before} to {after}"
        if self.training:
            text += (
                f"; saved for backward {readable_bytes(self.saved_bytes_before)} -> "
                f"{readable_bytes(self.saved_bytes_after)}"
            )
        return f"{text}."

    @property
    def rows(self) -> list[Row]:
        """The GEMMs with identical layers folded."""
        return fold(self.sites)

    def __str__(self) -> str:
        heads = ["GEMM", "times", "M x N x K", "pass", "absorbed, or why not", "before", "after"]
        table = [
            (
                row.name, row.times, shape_text(row.site), row.site.role,
                ", ".join(row.site.absorbed) if row.site.fused else row.site.reason,
                readable_bytes(row.site.bytes_before), readable_bytes(row.site.bytes_after),
            )
            for row in self.rows
        ]  # fmt: skip
        widths = [40, 5, 20, 15, 44, 9, 9]
        lines = [
            f"{self.name} on {self.device}: {self.summary}",
            *self.notes,
            "",
            tabulate(table, headers=heads, maxcolwidths=widths, tablefmt="simple"),
        ]
        for (reason, advice), found in advised([*self.near_misses, *self.unfused]).items():
            if advice.possible:
                lines += ["", f"{places(found)}: {reason}", f"  -> {advice.text}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Explanation of {self.name}: {self.summary}>"

    def html(self) -> str:
        """One self-contained page: no scripts, fonts or images from elsewhere."""
        from coda_inductor.explanation.page import page

        return page(self)

    def _repr_html_(self) -> str:
        """The page in a frame of its own: its styles must not leak into a notebook."""
        frame = 'style="width:100%;height:760px;border:0" title="coda_inductor explanation"'
        return f'<iframe {frame} srcdoc="{escape(self.html(), quote=True)}"></iframe>'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`html` to ``path``; returns the path."""
        target = Path(path)
        target.write_text(self.html(), encoding="utf-8")
        return target


def gemm_count(site: SiteReport) -> int:
    """How many of the model's GEMMs a site is: pairs and sums name each."""
    return site.site.count(" + ") + 1


def advised(misses: Sequence[NearMiss]) -> dict[tuple[str, Remedy], list[NearMiss]]:
    """Near misses by their reason (without node numbers) and its remedy; what can be helped first,
    then the commonest."""
    groups: dict[tuple[str, Remedy], list[NearMiss]] = {}
    for miss in misses:
        groups.setdefault((general_reason(miss.reason), miss.remedy), []).append(miss)
    ordered = sorted(groups, key=lambda key: (not key[1].possible, -len(groups[key])))
    return {key: groups[key] for key in ordered}


def places(misses: Sequence[NearMiss]) -> str:
    """``lm_head, rms_norm at model.layers.*.norm (x 16)``: where, with layers folded."""
    counts: dict[tuple[str, str], list[str]] = {}
    for miss in misses:
        what = "" if miss.what == "gemm" else f"{miss.what} at "
        counts.setdefault((what, general_path(miss.where)), []).append(miss.where)
    return ", ".join(
        f"{what}{found[0]}" if len(found) == 1 else f"{what}{path} (x {len(found)})"
        for (what, path), found in counts.items()
    )
