# SPDX-License-Identifier: Apache-2.0
"""The gains that the README shows: its table, and docs/gains.svg, from benchmarks/results.

A row is one case of one results file. Its baseline is the fastest of all variants without us in
the same run, with any mask, recipe or kernels. ``tests/patterns/test_documents.py`` compares what
is committed with what this makes.

Usage: python3 tools/gains.py
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "gains.svg"
#: How variants of ours begin; "before" is an older coda.
OURS = ("coda", "before")
BLOCK = re.compile(r"(?<=<!-- gains -->\n).*?(?=<!-- /gains -->)", re.DOTALL)


@functools.cache
def results(file: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        name: model, and what is run.
        file: of benchmarks/results.
        where: keys that lead to the measured variants in it.
        ours: our variant.
    """

    name: str
    file: str
    where: tuple[str, ...]
    ours: str = "coda"

    def measured(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fastest variant without us, and ours."""
        found = functools.reduce(lambda part, key: part[key], self.where, results(self.file))
        others = [found[each] for each in found if not each.startswith(OURS)]
        return min(others, key=_ms), found[self.ours]

    def figures(self) -> tuple[float, float, float, float]:
        """Milliseconds before and after, GiB at the peak before and after."""
        before, after = self.measured()
        return _ms(before), _ms(after), _gib(before), _gib(after)


def _ms(variant: dict[str, Any]) -> float:
    return variant["median_ms"]


def _gib(variant: dict[str, Any]) -> float:
    return variant["peak_mib"] / 1024


def _model(name: str, case: str, file: str = "h200_families") -> Row:
    return Row(name, file, ("families", f"{case}-bf16", "variants"))


def _float8(name: str, mode: str, variant: str) -> Row:
    where = ("fp8", f"llama:8B-8192-{mode}-bf16", "variants")
    return Row(name, "h200_fp8", where, f"coda_{variant}")


def _sustained(name: str, case: str) -> Row:
    return Row(name, "h200_headline", ("results", case))


def _experts(model: str, case: str) -> Row:
    return Row(f"{model} layers, training", "h100_experts", ("results", f"{case} layers, training"))


def _mask(name: str, case: str) -> Row:
    return Row(name, "h200_masks_models", ("results", case))


#: What a row's condition is -> the rows.
GROUPS: dict[str, tuple[Row, ...]] = {
    "No mask: the default of `transformers`": (
        _sustained("Llama 1B, training", "Llama 1B training"),
        _sustained("Llama 1B, prefill", "Llama 1B prefill"),
        _sustained("Llama 8B, 4 layers, training", "Llama 8B, 4 layers, training"),
        _sustained("Llama 8B, 4 layers, prefill", "Llama 8B, 4 layers, prefill"),
        _model("Qwen3 1.7B, 8 layers, training", "qwen3-8192-training", "h200_families_more"),
        _model("Mistral 7B, 4 layers, training", "mistral-8192-training", "h200_families_more"),
        _model("Granite 2B, 8 layers, training", "granite-8192-training", "h200_families_more"),
    ),
    "Mixtures of experts, no mask, on an H100": (
        _experts("OLMoE, 8", "olmoe, 8"),
        _experts("Qwen3-30B-A3B, 8", "qwen3_moe, 8"),
        _experts("Mixtral, 2", "mixtral, 2"),
    ),
    "Causal mask: `use_cache=False`; the baseline of the first two has none": (
        _model("Llama 1B, training", "1B-8192-training"),
        _model("Llama 1B, prefill", "1B-8192-forward"),
        Row(
            "Llama 1B, training, against Liger 0.8.5",
            "h200_model_train",
            ("model_train", "1B 8192", "variants"),
        ),
    ),
    "Masks from data: `use_cache=False`": (
        _mask("packed documents, Llama 1B, 8 layers", "packed"),
        _mask("padded on the left, Llama 1B, 8 layers", "padded"),
        _mask("window of 4096, Mistral 7B, 4 layers", "window"),
    ),
    "FP8 by torchao, no mask: the fastest of bfloat16 and all recipes is the baseline": (
        _float8("rowwise, Llama 8B, 4 layers, training", "training", "rowwise"),
        _float8("tensorwise, Llama 8B, 4 layers, training", "training", "tensorwise"),
        _float8("rowwise, Llama 8B, 4 layers, prefill", "forward", "rowwise"),
    ),
}


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def block() -> str:
    """What stands between the README's marks: the first gain as a sentence, and the table."""
    first, prefill, *_ = next(iter(GROUPS.values()))
    ms, our_ms, gib, our_gib = first.figures()
    forward, our_forward, *_ = prefill.figures()
    time = f"a training step takes {our_ms:.1f} ms instead of {ms:.1f}"
    peak = f"{our_gib:.1f} GiB on top of its weights instead of {gib:.1f}"
    lines = [
        f"Llama 1B, 8192 tokens, no mask, one H200: {time} and",
        f"{peak}; prefill {our_forward:.1f} ms instead of {forward:.1f}.",
        "",
        "| | fastest without coda, ms | coda, ms | | peak GiB on top of weights |",
        "| --- | --- | --- | --- | --- |",
    ]
    for condition, rows in GROUPS.items():
        lines.append(f"| **{condition}** | | | | |")
        for row in rows:
            before, after, *peaks = row.figures()
            times = f"{number(before)} | {number(after)} | {before / after:.2f}x"
            lines.append(f"| {row.name} | {times} | {' -> '.join(map(number, peaks))} |")
    return "\n".join(lines) + "\n"


def draw(path: Path) -> None:
    """The same as bars: what is left of the fastest time without us, and of its peak."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    places: list[float] = []
    labels, figures, y = [], [], 0.0
    figure = Figure(figsize=(11, 8.6), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.08})
    for condition, rows in GROUPS.items():
        title = condition.replace("`", "")
        time.text(0, y, title, weight="bold", va="center", fontsize=9.5, in_layout=False)
        for row in rows:
            y += 1
            places.append(y)
            labels.append(row.name)
            figures.append(row.figures())
        y += 1.4
    for axes, first, unit, title in (
        (time, 0, "ms", "time of a step or a prefill"),
        (memory, 2, "GiB", "peak memory on top of the weights"),
    ):
        before, after = ([each[first + k] for each in figures] for k in (0, 1))
        parts = [100 * b / a for a, b in zip(before, after, strict=True)]
        axes.barh(places, 100, color="#e4e7eb", height=0.72)
        axes.barh(places, parts, color="#8fbbe6", height=0.72)
        for place, a, b in zip(places, before, after, strict=True):
            text = f"{number(a)} -> {number(b)} {unit}"
            axes.text(2, place, text, va="center", fontsize=8)
        axes.set_title(f"{title}\n% of the fastest without coda", fontsize=10)
        axes.set_xlim(0, 100)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.patch.set_visible(False)  # a condition may reach across both
    time.set_yticks(places, labels, fontsize=8.5)
    time.set_ylim(y - 0.8, -0.7)
    # Text stays text and no date is written: what is drawn again compares equal.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gains"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Write both."""
    README.write_text(BLOCK.sub(lambda _: block(), README.read_text()))
    draw(PICTURE)


if __name__ == "__main__":
    main()
