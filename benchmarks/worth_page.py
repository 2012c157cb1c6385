# SPDX-License-Identifier: Apache-2.0
"""docs/internals/worth.md, from what ``python -m benchmarks worth`` measured."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .environment import REPOSITORY

#: A feature stays if it saves this part of a step, or that part of a peak, on one workload.
STEP, PEAK = 0.01, 0.03
_HEAD = """# What each feature is worth

For maintainers. Each row disables one pass, pattern or counter of a stock model and says where
that costs most: a longer step (sustained), a higher peak, more host time or kernels than with
everything. A feature earns its lines if it saves 1 % of a step or 3 % of a peak on one workload,
if another feature needs it, or if it is one of the method's primitives. A feature that saved 1.5
% of a step or 6 % of a peak on one workload was not measured on every other. Differences under 1
% are noise. A feature without lines has been removed since. `tables` runs twice, and only its
first run was disabled. Lines are those of the module or folder that has the feature, which
several may share, and of the test files that name it or import that module. Written by `python -m
benchmarks worth render`.
"""
_CLIFFS = """
## Cliffs

Where a model is written in a way that coda does not know, coda is what is left of it. Each row
disables one feature and says how coda then compares with torch.compile, on the workload where that
is least; `idioms` disables all idioms. torch.compile's attention is told to be causal where its
mask says no more, except in the row of `attention`, the pass that finds that out. Both steps are
measured in turns in one process. No row may be below 0.99x.
"""


def gains(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Feature -> what taking it away did, a row a workload; the largest loss of time first."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, workload in found["workloads"].items():
        for feature, without in workload.get("without", {}).items():
            row = {"workload": name, "error": without.get("error", "")}
            if not row["error"]:
                row |= {
                    "step": without["ms"] / without["ms_whole"] - 1,
                    "peak": without["peak"] / workload["whole"]["peak"] - 1,
                    "host": without["host"] - workload["whole"]["host"],
                    "kernels": without["kernels"] - workload["whole"]["kernels"],
                }
                plain = workload.get("untold" if feature == "attention" else "compile", {})
                if "ms" in plain:
                    row["beside"] = plain["ms"] / plain["ms_whole"] / (1 + row["step"])
            rows.setdefault(feature, []).append(row)
    for each in rows.values():
        each.sort(key=lambda row: -row.get("step", 0.0))
    return rows


def lines(feature: str) -> tuple[int, int]:
    """Lines of the code that ``feature`` stands in, and of the tests that name it."""
    home = _home(feature)
    if home is None:
        return 0, 0
    files = sorted(home.rglob("*.py")) if home.is_dir() else [home]
    module = ".".join(home.relative_to(REPOSITORY).with_suffix("").parts)
    names = (module, f'"{feature}"')
    tests = [path.read_text() for path in sorted((REPOSITORY / "tests").rglob("*.py"))]
    tests = [text for text in tests if any(name in text for name in names)]
    texts = [path.read_text() for path in files]
    lines, of_tests = (sum(len(text.splitlines()) for text in each) for each in (texts, tests))
    return lines, of_tests


def _home(feature: str) -> Path | None:
    """The module of the pass or pattern that ``feature`` is or counts under; its folder where a
    room has one for it."""
    from coda_inductor.pipeline import ON_ATEN, ON_DYNAMO

    pattern = REPOSITORY / "patterns" / f"{feature.removesuffix('_backward')}.py"
    for each in (*ON_DYNAMO, *ON_ATEN):
        if feature == each.name or feature in each.counts:
            path = Path(inspect.getfile(each.run))
            inside = path.relative_to(REPOSITORY / "coda_inductor").parts
            return path.parent if len(inside) > 2 else path
    return pattern if pattern.exists() else None


def earns(rows: list[dict[str, Any]]) -> bool:
    """Does a feature with these rows save enough anywhere?"""
    return any(row.get("step", 0) >= STEP or row.get("peak", 0) >= PEAK for row in rows)


def page(found: dict[str, Any], cliffs: dict[str, Any] | None = None) -> str:
    """The page, the most useful feature first; ``cliffs``: what was measured beside
    torch.compile."""
    rows = gains(found)
    for feature, later in gains(cliffs or {"workloads": {}}).items():  # replaces what was before
        known = {row["workload"]: row for row in [*rows.get(feature, ()), *later]}
        rows[feature] = sorted(known.values(), key=lambda row: -row.get("step", 0.0))
    table = []
    for feature in sorted(rows, key=lambda name: -max(r.get("step", 0) for r in rows[name])):
        good = [row for row in rows[feature] if not row["error"]]
        if not good:
            table.append([f"`{feature}`", "no", *[""] * 7, rows[feature][0]["error"][:60]])
            continue
        best, peak = good[0], max(good, key=lambda row: row["peak"])
        table.append([
            f"`{feature}`",
            "yes" if earns(good) else "no",
            f"{best['step']:+.1%} ({best['workload']})",
            f"{good[-1]['step']:+.1%} ({good[-1]['workload']})",
            f"{peak['peak']:+.1%} ({peak['workload']})",
            f"{best['host']:+.2f}",
            f"{best['kernels']:+d}",
            *lines(feature),
            len(good),
        ])  # fmt: skip
    head = ("feature", "earns its lines", "step without it, worst", "least", "peak, worst",
            "host ms", "kernels", "lines", "of tests", "workloads")  # fmt: skip
    sizes = [
        [name, len(w.get("without", {})), f"{w['whole']['peak']:.1f}", w["whole"]["kernels"]]
        for name, w in found["workloads"].items()
        if "whole" in w
    ]
    sizes = tabulate(sizes, ("workload", "features tried", "peak GiB", "kernels"), "github")
    text = f"{_HEAD}\n{_where(found)}\n{tabulate(table, head, 'github')}\n\n{sizes}\n"
    return text + (_cliffs(cliffs) if cliffs else "")


def _where(found: dict[str, Any]) -> str:
    environment = found["environment"]
    packages = ", ".join(f"{k} {v}" for k, v in environment.get("versions", {}).items() if v)
    return f"Measured on one {environment.get('gpu', 'GPU')}: {packages}.\n"


def _cliffs(found: dict[str, Any]) -> str:
    """The section on cliffs: each feature's row where it leaves least, the worst first."""
    every = {name: sorted((r["beside"], r["workload"], r["step"]) for r in rows if "beside" in r)
             for name, rows in gains(found).items()}  # fmt: skip
    worst = sorted((*rows[0], name, len(rows)) for name, rows in every.items() if rows)
    table = [[f"`{n}`", f"{x:.2f}x ({at})", f"{s:+.1%}", count] for x, at, s, n, count in worst]
    head = ("without", "coda beside torch.compile, worst", "step without it", "workloads")
    whole = []
    for name, workload in found["workloads"].items():
        if "ms" in (plain := workload.get("compile", {})):
            x = next((f"{x:.2f}x" for x, at, _ in every.get("idioms", ()) if at == name), "")
            ours, theirs = plain["ms_whole"], plain["ms"]
            whole.append([name, f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}x", x])
    names = ("workload", "torch.compile, ms", "coda, ms", "coda", "coda without idioms")
    tables = [tabulate(rows, of, "github") for rows, of in ((table, head), (whole, names))]
    return "\n".join((_CLIFFS, _where(found), tables[0], "", tables[1], ""))
