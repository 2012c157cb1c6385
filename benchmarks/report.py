# SPDX-License-Identifier: Apache-2.0
"""Results files -> what a terminal shows, and the page docs/h200/benchmarks.md.

Reads results only: no figure here is typed by hand. Every suite has the same tables: a row a case,
a column a variant; a speedup is torch.compile's least time over ours.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .environment import REPOSITORY

PAGE = REPOSITORY / "docs" / "h200" / "benchmarks.md"
TITLES = {"families": "Models of transformers: model-tokens-mode-dtype"}
#: Measurements of a variant: what a table is called, its key, the format, what it is divided by.
MEASURED = (("ms", "median_ms", ".3f", 1), ("peak GiB of a call", "peak_mib", ".2f", 1024))
METHOD = """\
Each figure is the median of interleaved rounds (one call of every variant per round, the order
rotating) after warm-up, in one process, timed with CUDA events. *compile* is torch.compile, *coda*
ours, *compile_causal* torch.compile of a model told to be causal instead of given a mask. A forward
pass is under `torch.no_grad()`, a training step has no optimizer. *Error* is the worst Frobenius
norm of the difference from an fp32 eager reference with the same weights, over that reference's
norm. A speedup is over the faster of *compile* and *compile_causal*. Encoders (BERT, ModernBERT,
T5, ViT) have the former alone, which reads a mask that hides nothing; eager, which makes none, was
not measured."""


def table(rows: list[list[str]], headers: list[str], form: str) -> str:
    """``tabulate`` with every cell as it is; nothing without rows."""
    if not rows:
        return ""
    return tabulate(rows, headers=headers, tablefmt=form, disable_numparse=True, stralign="right")


def complete(results: dict, suite: str) -> Iterator[tuple[str, dict]]:
    """The (case, result) pairs of `suite` that were measured."""
    return ((c, r) for c, r in results[suite].items() if r.get("variants"))


def speedup(result: dict) -> float | None:
    """torch.compile's least time over ours; None where one is missing."""
    times = {name: found["median_ms"] for name, found in result["variants"].items()}
    stock = [ms for name, ms in times.items() if name.startswith("compile")]
    return min(stock) / times["coda"] if stock and "coda" in times else None


def number(value: float | None, form: str, unit: float = 1) -> str:
    """`value` in `unit`, in format `form`; a dash for None."""
    return "-" if value is None else format(value / unit, form)


def _names(rows: list[tuple[str, dict]]) -> list[str]:
    return list(dict.fromkeys(name for _, result in rows for name in result["variants"]))


def measured(results: dict, suite: str, key: str, form: str, unit: float, how: str) -> str:
    """One measurement of every variant of every case."""
    found = list(complete(results, suite))
    names = _names(found)
    if all(r["variants"].get(name, {}).get(key) is None for _, r in found for name in names):
        return ""
    rows = [
        [case, *(number(r["variants"].get(name, {}).get(key), form, unit) for name in names)]
        + ([number(speedup(r), ".3f")] if key == "median_ms" else [])
        for case, r in found
    ]
    return table(rows, ["", *names, *(["speedup"] if key == "median_ms" else [])], how)


def errors(results: dict, suite: str, how: str) -> str:
    """The worst error of each variant, or its difference from torch.compile."""
    found = list(complete(results, suite))
    worst = {
        case: {name: max(each.values()) for name, each in r.get("accuracy", {}).items() if each}
        or r.get("difference", {})
        for case, r in found
    }
    names = [name for name in _names(found) if any(name in of for of in worst.values())]
    rows = [[c, *(number(of.get(n), ".2e") for n in names)] for c, of in worst.items() if of]
    return table(rows, ["", *names], how)


def together(results: dict, suite: str, how: str) -> str:
    """Geometric means of speedups and energy over cases whose baseline reads no mask."""
    groups: dict[str, list[dict]] = {}
    for case, result in complete(results, suite):
        if speedup(result) and "compile_causal" in result["variants"]:
            mode = next((m for m in ("forward", "training") if m in case), "all")
            groups.setdefault(mode, []).append(result)
    rows = []
    for mode, found in groups.items():
        speeds = [speed for r in found if (speed := speedup(r))]
        energies = [r.get("energy", {}) for r in found]
        ratios = [e["coda"]["joules"] / e["compile_causal"]["joules"] for e in energies
                  if {"coda", "compile_causal"} <= e.keys()]  # fmt: skip
        rows.append(
            [
                mode,
                str(len(speeds)),
                f"{statistics.geometric_mean(speeds):.3f}",
                f"{min(speeds):.3f}",
            ]
        )
        rows[-1] += [
            f"{max(speeds):.3f}",
            f"{statistics.geometric_mean(ratios):.3f}" if ratios else "-",
        ]
    return table(rows, ["", "cases", "speedup, geometric mean", "least", "most", "energy"], how)


def failures(results: dict) -> list[str]:
    """One line for every variant or case that has no figures, with the reason."""
    lines = []
    for suite in filter(results.__contains__, TITLES):
        for case, result in results[suite].items():
            if "error" in result:
                lines.append(f"{suite} {case}: {result['error']}")
            lines += [f"{suite} {case}, {n}: {why}" for n, why in result.get("errors", {}).items()]
    return lines


def sections(results: dict, how: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(title, [(caption, table)]) of each suite that has results."""
    for suite, title in TITLES.items():
        if suite in results:
            tables = [("cases with *compile_causal* together", together(results, suite, how))]
            tables += [(w, measured(results, suite, k, f, u, how)) for w, k, f, u in MEASURED]
            tables.append(("error", errors(results, suite, how)))
            yield title, [(caption, text) for caption, text in tables if text]


def short(results: dict) -> str:
    """The tables that a terminal wants last."""
    parts = [
        f"{title}, {c}\n{text}" for title, own in sections(results, "simple") for c, text in own
    ]
    return "\n\n".join([*parts, *(f"NOT MEASURED {line}" for line in failures(results))])


def merged(parts: list[dict]) -> dict[str, Any]:
    """One results dict out of several runs; ValueError if they are of different GPUs."""
    if len(gpus := {str(part["environment"]["gpu"]) for part in parts}) > 1:
        raise ValueError(f"runs differ in gpu ({', '.join(sorted(gpus))}): render them one by one")
    results: dict[str, Any] = {}
    for part in parts:
        for suite in part.keys() - {"environment"}:
            results.setdefault(suite, {}).update(part[suite])
    return results


def markdown(parts: list[dict], sources: list[str]) -> str:
    """The page of results from the files `sources`."""
    results = merged(parts)
    lines = ["# Stock models", "", "Rendered by `python -m benchmarks report FILES`; do not edit."]
    for title, tables in sections(results, "github"):
        lines += ["", f"## {title}"]
        for caption, text in tables:
            lines += ["", f"{caption}:", "", text]
    gpu = parts[0]["environment"]["gpu"] or "a CPU"
    lines += ["", "## How it was measured", "", METHOD, "", f"Runs on {gpu}:", ""]
    for source, run in zip(sources, (part["environment"] for part in parts), strict=True):
        versions = ", ".join(f"{name} {v}" for name, v in run["versions"].items() if v)
        lines.append(f"- `{source}`, {run['date'][:10]}, commit {run['commit']}, {versions}: "
                     f"`{run['command']}`")  # fmt: skip
    missing = failures(results)
    lines += ["", "## Not measured", "", *(f"- {line}" for line in missing)] if missing else []
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Render results files of one GPU model as a page."""
    parser = argparse.ArgumentParser("python -m benchmarks report", description=main.__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of one or more runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write")
    options = parser.parse_args(arguments)
    import json

    parts = [json.loads(path.read_text()) for path in options.results]
    options.page.write_text(markdown(parts, [path.name for path in options.results]))
    print(options.page.name)
