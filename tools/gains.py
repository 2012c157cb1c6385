# SPDX-License-Identifier: Apache-2.0
"""What the README says in numbers, and its picture, from the files in benchmarks/results.

A row of the table is who a reader is, the case that was measured for him, and the figures of
torch.compile and of ours in one file. ``tests/patterns/test_documents.py`` compares what is
committed with what this makes.

Usage: python3 tools/gains.py
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?<=<!-- (\w{5}) -->\n).*?(?=<!-- /\1 -->)", re.DOTALL)
#: Name of a picture -> its colors: text, torch.compile's bar, our bar.
PICTURES = {
    "gains.svg": ("#1f2328", "#d0d7de", "#2f81f7"),
    "gains_dark.svg": ("#e6edf3", "#3d444d", "#1f6feb"),
}


@functools.cache
def results(file: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((RESULTS / f"{file}.json").read_text())


@dataclass(frozen=True)
class Figure:
    """A measured variant: milliseconds of a step or a call, and GiB at its peak."""

    ms: float
    gib: float


def figure(place: str) -> Figure:
    """The variant at ``file/key/key``. Files have a median, or samples; peaks are MiB or GiB."""
    file, *keys = place.split("/")
    found = functools.reduce(lambda part, key: part[key], keys, results(file))
    samples = [s["ms"] if isinstance(s, Mapping) else s for s in found.get("samples") or (0.0,)]
    ms = found.get("median_ms") or found.get("ms") or statistics.median(samples)
    places = (found, *(s for s in found.get("samples", ()) if isinstance(s, Mapping)))
    peak = next((place["peak"] for place in places if "peak" in place), None)
    return Figure(ms, peak or found["peak_mib"] / 1024)


@dataclass(frozen=True)
class Row:
    """One line of the table: whom it describes, what was measured, both figures, what is to be set.
    ``weights``: GiB of the weights, where the files have peaks over them; the table has all memory.
    """

    who: str
    case: str
    before: Figure
    after: Figure
    do: str = "nothing"
    weights: float = 0.0

    @property
    def gain(self) -> str:
        """``1.28x``."""
        return f"{self.before.ms / self.after.ms:.2f}x"

    @property
    def times(self) -> str:
        """``695 -> 541 ms``."""
        return f"{number(self.before.ms)} -> {number(self.after.ms)} ms"

    @property
    def peaks(self) -> str:
        """``45.1 -> 42.8``."""
        before, after = (number(each.gib + self.weights) for each in (self.before, self.after))
        return f"{before} -> {after}"

    def __str__(self) -> str:
        cells = (self.who, self.case, self.times, self.gain, self.peaks, self.do)
        return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 400 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def row(who: str, case: str, place: str, variants: str, do: str = "nothing", **more: Any) -> Row:
    """The row of two ``variants`` ("before, after") of the cases at ``place``."""
    before, after = (figure(place.format(each)) for each in variants.split(", "))
    return Row(who, case, before, after, do, **more)


WHOLE = "h200_whole/results/{}"
FULL = row(
    "full fine-tuning, bf16",
    "Llama 3.1 8B, 32 layers, AdamW, H200",
    "h200_whole_torch215/results/new: 8B bf16 {} 1x8192 adamw",
    "causal, coda",
)
FLOAT8, TENSORS = (
    row("pretraining in FP8", f"the same, torchao's {recipe} recipe",
        f"h200_whole_torch215_fp8/results/new: 8B {recipe} {{}} 1x8192 adamw", "causal, coda",
        "[torchao's line](docs/fp8.md)")
    for recipe in ("rowwise", "tensorwise")
)  # fmt: skip
SHORT = row("short of memory", "8B widths, 8 layers, beside selective checkpoints, H200",
            "h200_memory_torch215/results/8B x8/{}", "compile:op, coda:0.7",
            "[`memory=0.7`](docs/memory.md)", weights=5.21)  # fmt: skip
EXPERTS = row("mixtures of experts", "OLMoE, 8 layers, H200",
              "h200_experts_torch215/results/olmoe, 8 layers, training/new: {}",
              "compile_causal, coda", "[grouped products](docs/experts.md)",
              weights=6.64)  # fmt: skip
ADAPTERS = "h200_whole_torch215_more/results/new: 8B {} 2x4096 adamw"
LORA = row("LoRA", "in bf16", ADAPTERS, "lora causal, lora coda")
LORA_FP8 = row("LoRA in FP8",
               "the same 8B, rank 16, AdamW, 2 x 4096 tokens, beside torch.compile in bf16",
               ADAPTERS, "lora causal, lora_fp8 coda",
               "[FP8 weights](docs/fp8.md#lora-on-fp8-weights)")  # fmt: skip
MASKS = "h200_masks_torch215/results/{}/{{}}"


def table() -> list[Row]:
    """All rows."""
    return [
        FULL,
        FLOAT8,
        SHORT,
        EXPERTS,
        LORA_FP8,
        row("SFT with TRL", "Qwen3 1.7B, 28 layers, 8 x 1024 tokens, TRL's defaults, H200, torch "
            "2.11", "h200_trainers_full/results/sft {}", "best, coda",
            "[`CodaCallback()`](docs/post_training.md)"),
        row("torchtitan in FP8", "Llama 3 8B, rowwise, FSDP2, AdamW, two H200s, torch 2.11",
            "h200x2_torchtitan/results/2:{}", "f8i:llama3:8B:inductor:none:1:fp8, "
            "f8c:llama3:8B:coda:none:1:fp8,head", "[one import](docs/frameworks.md#torchtitan)"),
        row("long prompts", "Llama 1B, prefill of 8192 tokens, H200",
            "h200_prefill_torch215/results/Llama 1B prefill/{}",
            "compile_causal, coda", weights=2.30),
        row("packed documents (1)", "1B widths, 4 layers, 8 documents a row, H200",
            MASKS.format("packed"), "compile_flex, coda", "`use_cache=False`", weights=0.94),
        row("padded batches (1)", "the same, 4 x 2048, padded on the left",
            MASKS.format("padded"), "compile, coda", "`use_cache=False`", weights=0.94),
    ]  # fmt: skip


def _fits(variant: str) -> tuple[int, float]:
    """The largest batch that was measured, in rows of 8192 tokens, and its tokens a second."""
    pattern = re.compile(variant.format(r"(\d)x8192"))
    rows = max(int(m[1]) for name in results("h200_whole")["results"]
               if (m := pattern.fullmatch(name)))  # fmt: skip
    ms = figure(WHOLE.format(variant.format(f"{rows}x8192"))).ms
    return rows, rows * 8192e3 / ms


def blocks() -> dict[str, str]:
    """What stands between the README's marks, by their names."""
    (two, slower), (three, faster) = (
        _fits(f"8B bf16 {backend} {{}} adamw8") for backend in ("causal", "coda")
    )
    lora = 100 * LORA.after.gib / LORA.before.gib
    peaks = f"from {number(FULL.before.gib)} to {number(FULL.after.gib)} GiB"
    text = f"""\
**Llama 3.1 8B, all 32 layers, with AdamW on one H200: a step of 8192 tokens takes
{number(FLOAT8.after.ms)} ms in FP8 under coda and {number(FLOAT8.before.ms)} under
torch.compile; in bfloat16 {number(FULL.after.ms)} and {number(FULL.before.ms)} ms.** In detail:

- **FP8**: {FLOAT8.gain} in torchao's rowwise recipe; {TENSORS.gain} in the tensorwise one, which is
the faster one for both ({number(TENSORS.before.ms)} -> {number(TENSORS.after.ms)} ms).

- **Memory**: the peak of the step in bfloat16 falls {peaks}. With 8-bit AdamW {three} rows of 8192
tokens fit ({faster:,.0f} tokens a second) where torch.compile fits {two} ({slower:,.0f}; torch
2.11). Where torch.compile has to recompute to fit, coda hardly does, and is {SHORT.gain} as fast.

- **Experts**: {EXPERTS.gain}. **LoRA**: {LORA.gain}, with {lora:.0f} % of the memory; with
frozen weights in FP8 {LORA_FP8.gain} torch.compile's speed in bfloat16.

- **bfloat16** without any of these: {FULL.gain}, because the GPU runs at its power limit, and GEMMs
need the same power under both.
"""
    title, *points = (
        textwrap.fill(part, 124, subsequent_indent="  " * part.startswith("-"))
        for part in text.split("\n\n")
    )
    head = ("you do", "measured", "torch.compile -> coda", "gain", "peak, GiB", "you set")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *map(str, table())]
    first = "\n".join((title, "", *points, ""))
    return {"first": first, "gains": "\n".join(lines) + "\n"}


def picture(ink: str, stock: str, ours: str) -> str:
    """Five bars as SVG: what coda leaves of torch.compile's time or memory."""
    bars = [
        ("FP8 step, Llama 8B, H200", FLOAT8.before.ms, FLOAT8.after.ms, "ms"),
        ("step with experts, OLMoE, H200", EXPERTS.before.ms, EXPERTS.after.ms, "ms"),
        ("bfloat16 step, Llama 8B, H200", FULL.before.ms, FULL.after.ms, "ms"),
        ("peak memory of that", FULL.before.gib, FULL.after.gib, "GiB"),
        ("peak memory of LoRA, Llama 8B, H200", LORA.before.gib, LORA.after.gib, "GiB"),
    ]
    title = "coda, in percent of torch.compile: less is better"
    look = f'font-family="sans-serif" font-size="15" fill="{ink}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 300" role="img" {look}>',
        f"<title>{title}</title>",
        f'<text x="4" y="18" font-weight="bold">{title}</text>',
    ]
    for i, (name, before, after, unit) in enumerate(bars):
        y, part = 36 + 53 * i, after / before
        said = f"{number(before)} &#8594; {number(after)} {unit}"
        bar = f'x="4" y="{y + 20}" height="20" rx="3"'
        lines += [
            f'<text x="4" y="{y + 13}">{name}</text>',
            f'<text x="496" y="{y + 13}" text-anchor="end">{said}</text>',
            f'<rect {bar} width="492" fill="{stock}"/>',
            f'<rect {bar} width="{492 * part:.1f}" fill="{ours}"/>',
            f'<text x="12" y="{y + 35}" font-weight="bold" fill="#fff">{100 * part:.0f} %</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write them."""
    made = blocks()
    README.write_text(BLOCK.sub(lambda found: made[found[1]], README.read_text()))
    for name, colors in PICTURES.items():
        (DOCS / name).write_text(picture(*colors))


if __name__ == "__main__":
    main()
