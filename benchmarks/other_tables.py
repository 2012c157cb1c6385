# SPDX-License-Identifier: Apache-2.0
"""Training steps with kernels chosen by other tables of measurements.

    python -m benchmarks.other_tables OUT.json --tables DIR[,DIR] [--models 1B,8B] [--tokens 8192]

Stock models of ``transformers``, forward and backward: torch.compile with the constant mask dropped
by hand, ours with the tables that ship, and ours with those of each folder (``CODA_TABLES``), in
one process. Each takes several steps in a row, whose first settles the clock (docs/gotchas.md,
"Power") and does not count; the next round begins with another one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

from . import contest, environment, families
from .cases import TRAINING, Case, ways
from .measure import Call, summary, synchronize

#: Steps of one variant in a row; those before the last COUNTED let the clock settle.
IN_A_ROW, COUNTED = 5, 4
BASELINE, SHIPPED = "compile_causal", "coda"


@contextlib.contextmanager
def tables(folder: Path | None) -> Iterator[None]:
    """What is compiled within reads the tables of ``folder``; None: those that ship."""
    with mock.patch.dict(os.environ, {} if folder is None else {"CODA_TABLES": str(folder)}):
        yield


def prepared(case: Case, folders: Mapping[str, Path | None]) -> dict[str, Call]:
    """The step of ``case`` under torch.compile, and under ours by each folder's tables; compiled.
    Nothing is measured meanwhile: ``{"tune": "never"}``."""
    contest.forget()
    work = families.Model(case)
    calls = {BASELINE: work.compiled(ways()[BASELINE])}
    for name, folder in folders.items():
        # Options of their own: Dynamo takes two backends with the same ones for one.
        own = ways({"tune": "never", "debug_dir": name})["coda_options"]
        with tables(folder):
            calls[name] = work.compiled(own)
            calls[name]()
    calls[BASELINE]()
    synchronize()
    return calls


def measured(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of single steps, COUNTED of each variant a round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        events = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(IN_A_ROW + 1)]
            marks[0].record()
            for mark in marks[1:]:
                calls[name]()
                mark.record()
            events[name] = marks[-COUNTED - 1 :]
        synchronize()
        for name, marks in events.items():
            found[name] += [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tables", required=True, help="folders, separated by commas")
    parser.add_argument("--models", default="1B,8B")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", default="", help="measured commit, where there is no .git")
    options = parser.parse_args(arguments)
    chosen = [Path(folder) for folder in options.tables.split(",")]
    folders: dict[str, Path | None] = {SHIPPED: None} | {f"coda, {d.name}": d for d in chosen}
    given = sys.argv[1:] if arguments is None else arguments
    about = environment.describe(given, options.commit or None, "benchmarks.other_tables")
    whole: dict[str, Any] = {"environment": about, "steps": {}}
    for model in options.models.split(","):
        case = Case(model, options.tokens, TRAINING)
        samples = measured(prepared(case, folders), options.rounds)
        whole["steps"][case.name] = {name: summary(ms) for name, ms in samples.items()}
        options.out.write_text(json.dumps(whole) + "\n")
        medians = {name: found["median_ms"] for name, found in whole["steps"][case.name].items()}
        rows = [[case.name, name, ms, medians[BASELINE] / ms] for name, ms in medians.items()]
        print(tabulate(rows, ["", "", "ms", "speed"], floatfmt=("", "", ".2f", ".3f")), flush=True)


if __name__ == "__main__":
    main()
