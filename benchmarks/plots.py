"""The page docs/benchmarks.md with its plots; apart, so that measuring needs no matplotlib."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from matplotlib import rcParams
from matplotlib.figure import Figure

from .report import LAYER_COLUMNS, LLAMA_COLUMNS, complete, label, markdown, median, merged, speedup

if TYPE_CHECKING:
    from pathlib import Path


def _bars(results: dict, suite: str, names: tuple[str, ...], title: str, path: Path) -> bool:
    """Grouped bars, one group per part, of each variant's speed relative to plain torch.compile."""
    parts = [
        (part, result) for part, result in complete(results, suite) if median(result, "compile")
    ]
    if not parts:
        return False
    shown = [name for name in names if any(median(result, name) for _, result in parts)]
    figure = Figure(figsize=(2 + 2.2 * len(parts), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(shown)
    for index, name in enumerate(shown):
        heights = [speedup(result, name, ("compile",)) or 0.0 for _, result in parts]
        places = [group + (index - (len(shown) - 1) / 2) * width for group in range(len(parts))]
        bars = axes.bar(places, heights, width, label=label(name))
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(parts)), [part for part, _ in parts])
    axes.set_ylabel("speed, torch.compile = 1")
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=7, ncols=3, loc="outside lower center")
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
    wanted = [
        ("layer", LAYER_COLUMNS, "Non-attention part of a Llama layer, forward"),
        ("llama", LLAMA_COLUMNS, "Llama prefill by prompt length in tokens"),
    ]
    images = []
    for suite, names, title in wanted:
        path = docs / f"benchmarks_{suite}.svg"
        if _bars(results, suite, names, title, path):
            images.append(path)
    page = docs / "benchmarks.md"
    page.write_text(
        markdown(results, [source.name for source in sources], [image.name for image in images])
    )
    return [page, *images]
