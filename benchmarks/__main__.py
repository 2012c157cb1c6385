"""The command line: ``python -m benchmarks --out DIR``, ``python -m benchmarks report FILE``.

Measuring writes into DIR, after every part: ``results.json``, ``tables.txt`` (the tables that are
also printed last), ``profiles.txt`` (kernels, and what our backend reports) and ``log.txt`` (all
that the processes printed).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import environment, layer, llama, report, runner
from .environment import REPOSITORY
from .runner import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITES = ("layer", "llama")
SUITE_SECONDS = 470.0


def _names(known: tuple[str, ...]):
    """An argparse type: a comma-separated list of names, each one of `known`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return names

    return parse


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results")
    add(
        "--suite",
        type=_names(SUITES),
        default=list(SUITES),
        help="suites to run (default: layer,llama)",
    )
    sizes = tuple(layer.SIZES)
    add(
        "--sizes",
        type=_names(sizes),
        default=["1B", "8B", "70B"],
        help=f"layer sizes, of {','.join(sizes)}",
    )
    add("--rows", type=int, default=8192, help="rows M of the layer (default 8192)")
    add("--norm", choices=tuple(layer.NORMS), default="hf", help="how the layer writes its RMSNorm")
    add(
        "--ceiling",
        type=Path,
        help="hand-composed layer to run beside ours; without it the column is left out",
    )
    add("--llama", choices=tuple(llama.SHAPES), default="1B", help="shape of the whole model")
    add(
        "--tokens",
        type=_lengths,
        default=[512, 2048, 8192],
        help="prompt lengths (default 512,2048,8192)",
    )
    add("--rounds", type=int, default=25, help="samples per variant (at most 12 for 70B)")
    add("--backend", default="coda", help="torch.compile backend measured as ours (default coda)")
    add("--timeout", type=float, default=240.0, help="seconds for one part (default 240)")
    add("--commit", help="measured commit, where the tree is a copy without .git")
    return parser


def _layer(options: argparse.Namespace, log: Path, deadline: float) -> Iterator[tuple[str, dict]]:
    for size in options.sizes:
        job = Job(
            suite="layer",
            size=size,
            length=options.rows,
            backend=options.backend,
            rounds=min(options.rounds, 12) if size == "70B" else options.rounds,
            norm=options.norm,
            ceiling=str(options.ceiling.resolve()) if options.ceiling else None,
        )
        yield size, runner.run(job, log, _left(options, deadline))


def _llama(options: argparse.Namespace, log: Path, deadline: float) -> Iterator[tuple[str, dict]]:
    for tokens in options.tokens:
        job = Job("llama", options.llama, tokens, backend=options.backend, rounds=options.rounds)
        yield str(tokens), runner.run(job, log, _left(options, deadline))


def _compile(options: argparse.Namespace, log: Path, deadline: float) -> Iterator[tuple[str, dict]]:
    for backend in dict.fromkeys(("inductor", options.backend)):
        with tempfile.TemporaryDirectory() as caches:
            runs = {}
            for state in ("cold", "warm"):
                job = Job("compile", options.llama, options.tokens[-1], backend=backend)
                runs[state] = runner.run(job, log, _left(options, deadline), Path(caches))
            yield backend, runs


def _left(options: argparse.Namespace, deadline: float) -> float:
    return min(options.timeout, deadline - time.monotonic())


def _save(results: dict, out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "tables.txt").write_text(report.short(results) + "\n")
    (out / "profiles.txt").write_text(report.profiles(results))


def measure(arguments: list[str]) -> None:
    """Run the suites that `arguments` name; files and terminal as the module docstring says."""
    options = _parser().parse_args(arguments)
    if options.ceiling and not options.ceiling.is_file():
        _parser().error(
            f"--ceiling {options.ceiling.name}: no such file; correct it or leave it out"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "log.txt"
    results: dict = {"environment": environment.describe(arguments, options.commit)}
    # Compile times belong to suite llama, but come last: they must not use up its time.
    steps = [("layer", "layer", _layer), ("llama", "llama", _llama), ("llama", "compile", _compile)]
    deadlines: dict[str, float] = {}
    for suite, part, jobs in steps:
        if suite not in options.suite:
            continue
        deadline = deadlines.setdefault(suite, time.monotonic() + SUITE_SECONDS)
        results[part] = {}
        for name, result in jobs(options, log, deadline):
            results[part][name] = result
            _save(results, options.out)
            print(f"{part} {name}: {result.get('error', 'done')}, log in {log.name}", flush=True)
    print("\n" + report.short(results))


def render(arguments: list[str]) -> None:
    """Render docs/benchmarks.md and its plots from results files of one machine."""
    parser = argparse.ArgumentParser("python -m benchmarks report", description=render.__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of one or more runs")
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="folder to write")
    options = parser.parse_args(arguments)
    from . import plots

    for path in plots.write(options.results, options.docs):
        print(path)


def main() -> None:
    """Dispatch on the first word."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["report"]:
        render(arguments[1:])
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
