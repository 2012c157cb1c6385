# SPDX-License-Identifier: Apache-2.0
"""Tables of suite `fp8`: times, memory, what each recipe gains, errors, first calls."""

from __future__ import annotations

import statistics

from .cases import RECIPES
from .tables import cells, complete, label, median, number, table

SUITE = "fp8"
NAMES = (
    *("compile", "coda", "coda_options"),
    *(f"{compiler}_{recipe}" for recipe in RECIPES for compiler in ("compile", "coda")),
)


def _shown(results: dict) -> list[str]:
    known = [result["variants"] for _, result in complete(results, SUITE)]
    return [name for name in NAMES if any(name in variants for variants in known)]


def _measured(results: dict, key: str, form: str, digits: str) -> str:
    names = _shown(results)
    rows = [
        [case, *cells(result, tuple(names), key, digits)]
        for case, result in complete(results, SUITE)
    ]
    return table(rows, ["", *map(label, names)], form)


def times(results: dict, form: str = "github") -> str:
    """Median milliseconds of every variant."""
    return _measured(results, "median_ms", form, ".3f")


def peaks(results: dict, form: str = "github") -> str:
    """MiB of every variant."""
    return _measured(results, "peak_mib", form, ".0f")


def _ratio(result: dict, other: str, ours: str) -> str:
    theirs, own = median(result, other), median(result, ours)
    return number(theirs / own if theirs and own else None, ".3f")


def worst_ratio(result: dict, ours: str, other: str) -> float | None:
    """The largest ratio of our error over the other's, of all gradients that have one."""
    own, theirs = (result["accuracy"].get(name, {}) for name in (ours, other))
    ratios = [own[tensor] / theirs[tensor] for tensor in own if theirs.get(tensor)]
    return max(ratios, default=None)


def gains(results: dict, form: str = "github") -> str:
    """A row for each case and recipe."""
    rows = []
    for case, result in complete(results, SUITE):
        for recipe in RECIPES:
            ours, theirs = f"coda_{recipe}", f"compile_{recipe}"
            if median(result, ours) is None:
                continue
            said = result["decisions"].get(ours)
            ratios = [_ratio(result, other, ours) for other in (theirs, "coda", "compile")]
            fused = f"{said['fused']} of {said['gemms']}" if said else number(None, "")
            error = number(worst_ratio(result, ours, theirs), ".3f")
            rows.append([case, recipe, *ratios, fused, error])
    heads = ["", "recipe", "torchao, torch.compile", "bf16 coda", "bf16 torch.compile"]
    return table(rows, [*heads, "fused", "error"], form)


def errors(results: dict, form: str = "github") -> str:
    """Mean and largest relative error of the gradients of every variant, against fp32."""
    names = _shown(results)
    rows = []
    for case, result in complete(results, SUITE):
        found = [list(result["accuracy"].get(name, {}).values()) for name in names]
        rows.append([case, *(
            f"{statistics.mean(each):.4f}, {max(each):.4f}" if each else number(None, "")
            for each in found
        )])  # fmt: skip
    return table(rows, ["", *map(label, names)], form)


def cold(results: dict, form: str = "github") -> str:
    """Seconds of first calls; a dash for what failed."""
    known = {c: r["cold_s"] for c, r in results.get(SUITE, {}).items() if "cold_s" in r}
    names = [name for name in NAMES if any(name in found for found in known.values())]
    seconds = {c: [found.get(name) for name in names] for c, found in known.items()}
    rows = [
        [case, *(number(s if isinstance(s, float) else None, ".1f") for s in each)]
        for case, each in seconds.items()
    ]
    return table(rows, ["", *map(label, names)], form)
