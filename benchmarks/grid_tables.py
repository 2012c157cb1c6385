# SPDX-License-Identifier: Apache-2.0
"""Tables of suites `grid` and `families`: every case, and what they come to together."""

from __future__ import annotations

import re
import statistics

from .cases import FORWARD, TRAINING
from .tables import (
    COMPILE_MODES,
    cells,
    complete,
    label,
    measurement,
    median,
    number,
    speedup,
    table,
)

#: Ours, as a user who asks for nothing gets it, and with the options of the run.
OURS = ("coda", "coda_options")
#: torch.compile of a model whose attention is told to be causal instead of given a mask.
CAUSAL = "compile_causal"
#: A case below is one that torch.compile is faster at, beyond what the clock tells apart.
FLOOR = 0.99
#: The kernels that are GEMMs in a profile of torch.compile: cuBLAS's, also what adds up a split K.
GEMMS = re.compile("nvjet|cublas|cutlass|gemm", re.IGNORECASE)


def speedups(
    results: dict,
    suite: str,
    ours: str,
    mode: str,
    baselines: tuple[str, ...] = COMPILE_MODES,
) -> dict[str, float]:
    """Case -> speed of `ours` over the better of `baselines`, of the cases of `mode` that have
    both."""
    found = {
        case: speedup(result, ours, baselines)
        for case, result in complete(results, suite)
        if f"-{mode}-" in case
    }
    return {case: ratio for case, ratio in found.items() if ratio is not None}


def spread(result: dict, ours: str = "coda") -> tuple[float, float] | None:
    """20th and 80th percentile of the better torch.compile's time over that of `ours`, round by
    round.
    """
    modes = [name for name in COMPILE_MODES if median(result, name) is not None]
    better = min(modes, key=lambda name: median(result, name) or 0.0, default="")
    pairs = zip(
        measurement(result, better, "samples_ms") or (),
        measurement(result, ours, "samples_ms") or (),
        strict=False,
    )
    ratios = sorted(theirs / own for theirs, own in pairs)
    if not ratios:
        return None
    last = len(ratios) - 1
    return ratios[round(0.2 * last)], ratios[round(0.8 * last)]


def joules(result: dict, name: str) -> float | None:
    """Joules of a call of one variant; None if they were not measured."""
    return result["energy"].get(name, {}).get("joules")


def error(result: dict, name: str) -> float | None:
    """Relative error against fp32 of one variant's results as one vector; None if unknown."""
    return result.get("accuracy", {}).get(name, {}).get("all")


def _range(found: tuple[float, float] | None) -> str:
    return f"{found[0]:.3f} to {found[1]:.3f}" if found else number(None, "")


def _fused(result: dict, ours: str) -> str:
    said = result["decisions"].get(ours)
    return f"{said['fused']} of {said['gemms']}" if said else number(None, "")


def shown(results: dict, suite: str) -> tuple[str, ...]:
    """The variants that any case has, in the order of the columns."""
    names = (*COMPILE_MODES, CAUSAL, *OURS)
    known = [result["variants"] for _, result in complete(results, suite)]
    return tuple(name for name in names if any(name in variants for variants in known))


def cases(results: dict, suite: str, form: str = "github") -> str:
    """A row a case: times, speedup with its spread, GEMMs fused, joules."""
    names = shown(results, suite)
    ours = [name for name in OURS if name in names]
    powered = ("compile", *ours)
    found = list(complete(results, suite))
    accurate = [name for name in powered if any(error(result, name) for _, result in found)]
    rows = []
    for case, result in found:
        row = [case, *cells(result, names)]
        for name in ours:
            row += [number(speedup(result, name, COMPILE_MODES), ".3f")]
            if CAUSAL in names:
                row += [number(speedup(result, name, (CAUSAL,)), ".3f")]
            row += [_range(spread(result, name)), _fused(result, name)]
        row += [number(joules(result, name), ".3f") for name in powered]
        row += [number(error(result, name), ".2e") for name in accurate]
        rows.append(row)
    headers = ["ms", *map(label, names)]
    for name in ours:
        headers += [f"speedup, {label(name)}"]
        headers += ["over is_causal"] if CAUSAL in names else []
        headers += ["20 to 80 %", "fused"]
    headers += [f"J, {label(name)}" for name in powered]
    headers += [f"error, {label(name)}" for name in accurate]
    return table(rows, headers, form)


def together(results: dict, suite: str, form: str = "github") -> str:
    """Geometric mean, extremes and the number of slower cases of each of ours, by mode."""
    rows = []
    for ours in OURS:
        for mode in (FORWARD, TRAINING):
            found = speedups(results, suite, ours, mode)
            if found:
                values = list(found.values())
                worst = min(found, key=found.__getitem__)
                rows.append(
                    [
                        label(ours),
                        mode,
                        str(len(values)),
                        f"{statistics.geometric_mean(values):.3f}",
                        f"{min(values):.3f} ({worst})",
                        f"{max(values):.3f}",
                        str(sum(value < FLOOR for value in values)),
                        number(_energy(results, suite, ours, mode), ".3f"),
                    ]
                )
    headers = ["", "", "cases", "geometric mean", "least", "most", f"under {FLOOR}", "joules"]
    return table(rows, headers, form)


def ceiling(result: dict) -> tuple[float, bool] | None:
    """How many times as fast torch.compile's call were, by its profile, if nothing but its GEMMs
    took time.

    Returns:
        The ratio, and whether it is exact: a GEMM that the profile leaves out as too short is
        taken for something else, so that the true ratio is smaller. None without a GEMM.
    """
    profile = result.get("profile", {}).get("compile", {"total_us": 0.0, "kernels": []})
    gemms = sum(k["us"] for k in profile["kernels"] if GEMMS.search(k["name"]))
    listed = sum(k["us"] for k in profile["kernels"])
    return (profile["total_us"] / gemms, listed >= 0.9999 * profile["total_us"]) if gemms else None


def ceilings(results: dict, suite: str, form: str = "github") -> str:
    """Geometric mean and extremes of :func:`ceiling` by mode."""
    rows = []
    for mode in (FORWARD, TRAINING):
        found = {
            case: known
            for case, result in complete(results, suite)
            if f"-{mode}-" in case and (known := ceiling(result))
        }
        if found:
            ratios = {case: ratio for case, (ratio, _) in found.items()}
            least, most = (pick(ratios, key=ratios.__getitem__) for pick in (min, max))
            rows.append(
                [
                    mode,
                    str(len(ratios)),
                    "" if all(exact for _, exact in found.values()) else "at most",
                    f"{statistics.geometric_mean(ratios.values()):.3f}",
                    f"{ratios[least]:.3f} ({least})",
                    f"{ratios[most]:.3f} ({most})",
                ]
            )
    return table(rows, ["", "cases", "", "geometric mean", "least", "most"], form)


def _energy(results: dict, suite: str, ours: str, mode: str) -> float | None:
    """Geometric mean of the joules of `ours` over torch.compile's."""
    ratios = [
        own / theirs
        for case, result in complete(results, suite)
        if f"-{mode}-" in case
        and (own := joules(result, ours))
        and (theirs := joules(result, "compile"))
    ]
    return statistics.geometric_mean(ratios) if ratios else None
