# SPDX-License-Identifier: Apache-2.0
"""The page docs/benchmarks.md with its plots; apart, so that measuring needs no matplotlib."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from matplotlib import rcParams
from matplotlib.figure import Figure

from . import ratio_plot
from .kernels import STEP
from .report import markdown, merged
from .tables import LAYER_COLUMNS, LLAMA_COLUMNS, complete, label, median, speedup
from .train_tables import KERNEL_COLUMNS, STEP_COLUMNS, block_label, step_gib

if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Panel:
    """Grouped bars of one suite: one group per part, one bar per variant.

    Attributes:
        title: heading.
        names: the variants.
        ending: what the names of these variants end in.
        memory: peak GiB of a training step instead of the speed relative to plain torch.compile.
    """

    title: str
    names: tuple[str, ...]
    ending: str = ""
    memory: bool = False

    def height(self, result: dict, name: str) -> float:
        """Height of one bar; 0 for what was not measured."""
        if self.memory:
            return step_gib(result, name, with_model=True) or 0.0
        return speedup(result, name + self.ending, ("compile" + self.ending,)) or 0.0


#: A variant has one colour in all figures.
COLORS = {
    "eager": "C7",
    "compile": "C0",
    "max_autotune": "C9",
    "coda": "C1",
    "ceiling": "C4",
    "gemms": "C5",
    "gemms_fused": "C6",
    "liger": "C2",
    "liger_compile": "C8",
    **dict.fromkeys(("compile_graph", "compile_checkpoint"), "C9"),
    **dict.fromkeys(("coda_graph", "coda_checkpoint"), "C3"),
}
FIGURES = {
    "layer": [Panel("Non-attention part of a Llama layer, forward", LAYER_COLUMNS)],
    "layer_train": [
        Panel("Non-attention part of a Llama layer, forward and backward", LAYER_COLUMNS)
    ],
    "kernels": [
        Panel("Forward, by block and width d", KERNEL_COLUMNS),
        Panel("Forward and backward", KERNEL_COLUMNS, ending=STEP),
    ],
    "llama": [Panel("Llama prefill by prompt length in tokens", LLAMA_COLUMNS)],
    "model_train": [
        Panel("Training step by model and tokens", STEP_COLUMNS),
        Panel("Peak memory of the step", STEP_COLUMNS, memory=True),
    ],
}
#: Suites of many cases: a point each.
RATIOS = ("grid", "families")


def _draw(axes: Any, panel: Panel, parts: list[tuple[str, dict]], shown: list[str], suite: str):
    """Fill `axes` with `panel`; `parts` are (label, result) pairs."""
    width = 0.8 / len(shown)
    for index, name in enumerate(shown):
        heights = [panel.height(result, name) for _, result in parts]
        places = [group + (index - (len(shown) - 1) / 2) * width for group in range(len(parts))]
        color = COLORS[name.removesuffix(panel.ending)]
        bars = axes.bar(places, heights, width, label=label(name, suite), color=color)
        form = ".1f" if panel.memory else ".2f"
        axes.bar_label(
            bars, [f"{height:{form}}" if height else "" for height in heights], fontsize=7
        )
    axes.set_xticks(range(len(parts)), [part for part, _ in parts], fontsize=8)
    axes.margins(x=0.02)
    axes.set_title(panel.title, fontsize=10)
    if panel.memory:
        axes.set_ylabel("GiB")
    else:
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylabel("speed, torch.compile = 1")


def _tick(part: str, result: dict) -> str:
    """Below a group of suite `kernels`: its block, a line for each piece, and its width."""
    return block_label(part, result, ", d = ").replace(", ", "\n")


def _figure(results: dict, suite: str, path: Path) -> bool:
    """Draw the panels of `suite` into `path`; False where there is nothing to draw."""
    if suite == "fp8":  # tables only
        return False
    if suite in RATIOS:
        return ratio_plot.write(results, suite, path)
    parts = [
        (_tick(part, result) if suite == "kernels" else part, result)
        for part, result in complete(results, suite)
        if median(result, "compile")
    ]
    if not parts:
        return False
    panels = [
        (panel, shown)
        for panel in FIGURES[suite]
        if (shown := [n for n in panel.names if any(panel.height(r, n) for _, r in parts)])
    ]
    bars = len(parts) * max(len(shown) for _, shown in panels)
    size = (max(2 + 0.32 * bars, 5), 0.5 + 3.5 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(panels), squeeze=False)
    for (panel, shown), (axes,) in zip(panels, rows, strict=True):
        _draw(axes, panel, parts, shown, suite)
    handles, names = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=7, ncols=3, loc="outside lower center")
    figure.savefig(path, metadata={"Date": None})
    return True


def write(sources: list[Path], docs: Path) -> list[Path]:
    """Write benchmarks.md and its plots from results files of one machine into the folder `docs`.

    Returns the written paths. Raises ValueError if the files are of different machines.
    """
    results = merged([json.loads(source.read_text()) for source in sources])
    docs.mkdir(parents=True, exist_ok=True)
    # Reproducible ids: rendering the same results twice must not change a committed file.
    rcParams["svg.hashsalt"] = "benchmarks"
    paths = {suite: docs / f"benchmarks_{suite}.svg" for suite in (*FIGURES, *RATIOS)}
    images = [path for suite, path in paths.items() if _figure(results, suite, path)]
    page = docs / "benchmarks.md"
    page.write_text(
        markdown(results, [source.name for source in sources], [image.name for image in images])
    )
    return [page, *images]
