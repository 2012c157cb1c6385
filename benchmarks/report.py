# SPDX-License-Identifier: Apache-2.0
"""Results files -> what a terminal shows, what lies beside the results, and docs/benchmarks.md.

Reads results only: no figure here is typed by hand.
"""

from __future__ import annotations

from tabulate import tabulate

from .sections import SECTIONS
from .tables import complete

#: What a run's environment says of the run itself.
RUN = ("commit", "date", "command")
SUITES = tuple(section.suite for section in SECTIONS if section.suite != "compile")


def merged(parts: list[dict]) -> dict:
    """One results dict out of several runs on one machine; where parts overlap, the later one wins.

    Raises ValueError if the runs are not of one GPU, driver and set of package versions. A package
    that only some of the runs had is none of a difference.
    """
    results: dict = {"environment": dict(parts[0]["environment"], versions={})}
    environment = results["environment"]
    for part in parts:
        found = part["environment"]
        for key in ("gpu", "driver"):
            _same(key, environment[key], found[key])
        for package, version in found["versions"].items():
            known = environment["versions"].setdefault(package, version)
            # Not ours: the commit says which code of ours ran.
            if known and version and package != "coda-inductor":
                _same(f"versions of {package}", known, version)
            environment["versions"][package] = known or version
        for suite, measured in part.items():
            if suite != "environment":
                results.setdefault(suite, {}).update(measured)
    for key in RUN:
        values = dict.fromkeys(part["environment"][key] or "unknown" for part in parts)
        environment[key] = "; ".join(values)
    environment["runs"] = [
        {key: run[key] for key in RUN}
        for part in parts
        for run in part["environment"].get("runs", [part["environment"]])
    ]
    return results


def _same(what: str, known: str | None, found: str | None) -> None:
    if known != found:
        raise ValueError(f"runs differ in {what} ({known} and {found}): render them one by one")


def failures(results: dict) -> list[str]:
    """One line for every variant or part that has no figures, with the reason."""
    lines = []
    for suite in SUITES:
        for part, result in results.get(suite, {}).items():
            if "error" in result:
                lines.append(f"{suite} {part}: {result['error']}")
            reasons: dict[str, list[str]] = {}
            for name, why in result.get("errors", {}).items():
                reasons.setdefault(why, []).append(name)
            lines += [
                f"{suite} {part}, {', '.join(names)}: {why}" for why, names in reasons.items()
            ]
    for backend, runs in results.get("compile", {}).items():
        lines += [
            f"compile, {backend}, {state}: {run['error']}"
            for state, run in runs.items()
            if "error" in run
        ]
    return lines


def short(results: dict) -> str:
    """The tables that a terminal wants last."""
    parts = [
        f"{section.title}. {caption}".strip() + "\n" + table
        for section in SECTIONS
        if section.shown(results)
        for caption, make in section.tables
        if (table := make(results, "simple"))
    ]
    return "\n\n".join([*parts, *(f"NOT MEASURED {line}" for line in failures(results))])


def profiles(results: dict) -> str:
    """Device time by kernel of every profiled variant, then what our backend reports about each
    part.
    """
    blocks = []
    for suite in SUITES:
        for part, result in complete(results, suite):
            for name, profile in result["profile"].items():
                rows = [
                    [f"{k['us']:.1f}", f"{k['calls']:.1f}", k["name"][:110]]
                    for k in profile["kernels"]
                ]
                title = (
                    f"{suite} {part}: {name}, {profile['total_us']:.0f} us on the device per call"
                )
                blocks.append(title + "\n" + _plain(rows, ["us", "calls", "kernel"]))
            blocks += [
                f"{suite} {part}: coda's report\n{table}" for table in result.get("reports", [])
            ]
            if "counters" in result:
                blocks.append(f"{suite} {part}: coda's counters {result['counters']}")
    return "\n\n".join(blocks) + "\n"


def _plain(rows: list[list[str]], headers: list[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)


def _environment(environment: dict) -> str:
    versions = ", ".join(
        f"{name} {version or 'absent'}" for name, version in environment["versions"].items()
    )
    rows = [
        ["GPU", f"{environment['gpu'] or 'none'}, driver {environment['driver'] or 'none'}"],
        ["software", f"Python {environment['python']}, {versions}"],
    ]
    table = tabulate(rows, headers=["", ""], tablefmt="github", disable_numparse=True)
    runs = [
        f"- {run['date'][:16].replace('T', ' ')}, commit {run['commit'] or 'unknown'}: "
        f"`{run['command']}`"
        for run in environment.get("runs", [environment])
    ]
    ceiling = "`--ceiling` names a layer composed by hand, which is not here: leave it out"
    return "\n".join([table, "", f"Runs, in UTC ({ceiling}):", "", *runs])


METHOD = """\
Each figure is the median of interleaved rounds (one call of every variant per round, the order
rotating) after warm-up, in one process, timed with CUDA events; all samples are in the results
file. Every compiled variant has its own copy of the module with the same weights. Errors are
Frobenius norms of the difference from an fp32 eager reference with the same weights, over the norm
of that reference."""


def markdown(results: dict, sources: list[str], plots: list[str]) -> str:
    """The page docs/benchmarks.md.

    Args:
        results: what to render.
        sources: names of the results files in benchmarks/results that it came from.
        plots: names of the images beside the page.
    """
    files = " ".join(f"benchmarks/results/{source}" for source in sources)
    lines = ["# Benchmarks", "", f"Rendered by `python -m benchmarks report {files}`; do not edit."]
    lines += ["", _environment(results["environment"]), "", METHOD, ""]
    lines += [line for image in plots for line in (f"![{image}]({image})", "")]
    for section in SECTIONS:
        if section.shown(results):
            lines += [f"## {section.title}", "", section.text(results), ""]
            for caption, make in section.tables:
                if table := make(results, "github"):
                    lines += [caption, ""] if caption else []
                    lines += [table, ""]
    if failures(results):
        lines += ["## Not measured", "", *(f"- {line}" for line in failures(results)), ""]
    return "\n".join(lines)
