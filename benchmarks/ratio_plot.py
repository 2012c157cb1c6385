# SPDX-License-Identifier: Apache-2.0
"""The plot of suites `grid` and `families`: the speedup of every case as a point, by size."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from .cases import FORWARD, TRAINING, Case
from .families import FAMILIES
from .grid_tables import CAUSAL, FLOOR, OURS, speedups, spread
from .tables import complete, label

if TYPE_CHECKING:
    from pathlib import Path

COLORS = {"coda": "C1", "coda_options": "C3"}
#: Between two sizes, in points.
GAP = 1.2


def _places(cases: list[Case]) -> dict[tuple[str, int, str], float]:
    """(size, rows, dtype) -> where it stands: side by side, with a gap between sizes."""
    places: dict[tuple[str, int, str], float] = {}
    at = 0.0
    order = list(dict.fromkeys(case.size for case in cases))
    for size in order:
        group = {(c.rows, c.dtype) for c in cases if c.size == size}
        for rows, dtype in sorted(group):
            places[size, rows, dtype] = at
            at += 1
        at += GAP - 1 if len(group) == 1 else GAP
    return places


def _key(case: Case) -> tuple[str, int, str]:
    return case.size, case.rows, case.dtype


def _points(
    axes: Any, results: dict, suite: str, mode: str, places: dict[tuple[str, int, str], float]
) -> None:
    """The cases of `mode`, of each of ours beside each other."""
    known = dict(complete(results, suite))
    for shift, ours in enumerate(OURS):
        found = speedups(results, suite, ours, mode)
        if not found:
            continue
        mean = statistics.geometric_mean(found.values())
        under = sum(ratio < FLOOR for ratio in found.values())
        text = f"{label(ours)}: geometric mean {mean:.3f} of {len(found)}"
        text += f", {under} under {FLOOR}" if under else ""
        at = [places[_key(Case.parse(name))] + 0.25 * shift for name in found]
        heights = list(found.values())
        axes.plot(at, heights, "o", color=COLORS[ours], markersize=5, label=text)
        for x, name in zip(at, found, strict=True):
            if edges := spread(known[name], ours):
                axes.plot([x, x], edges, color=COLORS[ours], linewidth=1)
        causal = speedups(results, suite, ours, mode, (CAUSAL,))
        if causal:
            mean = statistics.geometric_mean(causal.values())
            axes.plot(
                [places[_key(Case.parse(name))] + 0.25 * shift for name in causal],
                list(causal.values()),
                "o",
                color=COLORS[ours],
                markersize=5,
                markerfacecolor="none",
                label=f"{label(ours)} over {label(CAUSAL)}: {mean:.3f} of {len(causal)}",
            )


def _dress(axes: Any, mode: str, places: dict[tuple[str, int, str], float]) -> None:
    """Lines, ticks and names of the sizes."""
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(FLOOR, color="C7", linewidth=0.8, linestyle="--")
    beside = axes.get_yaxis_transform()
    axes.text(1.003, FLOOR, str(FLOOR), transform=beside, va="center", fontsize=7)
    groups = {
        size: [place for key, place in places.items() if key[0] == size]
        for size in dict.fromkeys(size for size, _, _ in places)
    }
    single = all(len(group) == 1 for group in groups.values())
    if single:
        ticks = [FAMILIES.get(size, size) for size, _, _ in places]
    else:
        ticks = [f"{rows} {dtype}" if dtype != "bf16" else str(rows) for _, rows, dtype in places]
    axes.set_xticks(list(places.values()), ticks, fontsize=8, rotation=25 if single else 90)
    if single:  # the end of a name below its point
        for name in axes.get_xticklabels():
            name.set(horizontalalignment="right", rotation_mode="anchor")
    low, high = min(places.values()), max(places.values())
    axes.set_xlim(low - 0.7, high + 0.7)  # also where a mode has fewer cases
    axes.set_ylabel("speed, better torch.compile = 1")
    axes.set_title(mode, fontsize=10, loc="left")
    axes.grid(axis="y", linewidth=0.3)
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 3, "frameon": False}
    axes.legend(fontsize=8, **above)
    if not single:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.1 * (high - low))  # for the names
        for size, group in groups.items():
            middle = statistics.mean(group)
            axes.text(
                middle, 0.98, size, transform=axes.get_xaxis_transform(), ha="center", va="top"
            )
        for left, right in itertools.pairwise(groups.values()):
            axes.axvline((left[-1] + right[0]) / 2, color="C7", linewidth=0.4)


def write(results: dict, suite: str, path: Path) -> bool:
    """Draw all cases of `suite` into `path`; False where there is nothing to draw."""
    modes = [
        mode
        for mode in (FORWARD, TRAINING)
        if any(speedups(results, suite, ours, mode) for ours in OURS)
    ]
    if not modes:
        return False
    places = _places([Case.parse(name) for name, _ in complete(results, suite)])
    width = max(9, 2 + 0.3 * (max(places.values()) + 1))
    size = (width, 0.5 + 3.6 * len(modes))
    figure = Figure(figsize=size, layout="constrained")
    for mode, (axes,) in zip(modes, figure.subplots(len(modes), squeeze=False), strict=True):
        _points(axes, results, suite, mode, places)
        _dress(axes, mode, places)
    figure.savefig(path, metadata={"Date": None})
    return True
